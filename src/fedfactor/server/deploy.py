"""Plain models, built from the server's tensors and a client's private ones."""

from __future__ import annotations

from torch import nn

from fedfactor.nn.norms import batch_norms, with_statistics
from fedfactor.protocol.method import Participant
from fedfactor.protocol.setup import Setup, kept_of
from fedfactor.protocol.states import HeldTensors, States
from fedfactor.server.calibrate import Calibration
from fedfactor.server.state import Server


def deploy_global(setup: Setup, server: Server, capacity: float, calibration: Calibration) -> nn.Module:
    """Return the server's model at a capacity as a plain module, with its norm statistics."""
    now = setup.at(server.round)
    kept = {} if setup.has_global_model else now.kept(capacity)
    now.move(now.network(capacity), server.moves.total)
    model = now.method.deploy(server.silenced(), now.network(capacity), capacity, kept)
    return _calibrated(setup, model, capacity, calibration)


def deploy_personal(
    setup: Setup, server: Server, who: Participant, store: States, calibration: Calibration
) -> nn.Module:
    """Return a client's own model as a plain module, with its norm statistics."""
    now = setup.at(server.round)
    kept = kept_of(setup, store.read("client", who.client), server.round).get("kept") or now.kept(who.capacity)
    network, tensors = now.network(who.capacity), server.silenced()
    now.move(network, server.moves.total)
    if now.method.traits.space == "personal":  # the server has a model of its own for this client
        plan = now.method.plan(tensors, who, network, None)
        tensors = now.method.download(tensors, who, plan, HeldTensors(store, "server"), network)
    model = now.method.deploy(tensors, network, who.capacity, kept)
    if setup.training.own_norms:
        return with_statistics(model, calibration.of(who))
    return _calibrated(setup, model, who.capacity, calibration)


def _calibrated(setup: Setup, model: nn.Module, capacity: float, calibration: Calibration) -> nn.Module:
    if not setup.method.traits.calibrates or not batch_norms(model):
        return model
    return with_statistics(model, calibration.at(capacity))
