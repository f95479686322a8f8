"""Plain models: the server's tensors, and the private ones of the right client."""

from __future__ import annotations

import pytest
import torch

from fedfactor.nn.state import tensors_of
from fedfactor.protocol.setup import kept_of
from fedfactor.protocol.states import HeldTensors
from tests.helpers.tiny import run


def test_a_personal_model_has_the_servers_tensors_and_the_clients_own() -> None:
    result = run("fedper", rounds=1)
    federation, cohort = result.federation, result.history[-1]["cohort"]
    heads = []
    for client in range(6):
        model = tensors_of(result.client_model(client))
        assert all(torch.equal(model[name], tensor) for name, tensor in result.server.tensors.items())
        kept = kept_of(federation.setup, federation.store.read("client", client), 1)
        own = kept["kept"] if client in cohort else federation.setup.kept(1.0)
        assert all(torch.equal(model[name], own[name]) for name in ("fc.weight", "fc.bias"))
        heads.append(tuple(model["fc.bias"].tolist()))
    assert len(set(heads)) == 4, "three that have trained, and the first one of all others"


def test_a_personal_model_of_fedamp_is_the_one_that_the_server_holds_for_the_client() -> None:
    result = run("fedamp", rounds=1)
    held = HeldTensors(result.federation.store, "server")
    first, second, *_ = result.history[-1]["cohort"]
    assert not torch.equal(held[first]["fc.bias"], held[second]["fc.bias"])
    for client, other in ((first, second), (second, first)):
        model = result.client_model(client).fc.bias
        assert (model - held[client]["fc.bias"]).norm() < (model - held[other]["fc.bias"]).norm()


@pytest.mark.parametrize("level", [1.0, 0.5])
def test_a_global_model_has_the_size_of_its_capacity(level: float) -> None:
    assert run("heterofl", rounds=1).model_at(level).fc.in_features == int(32 * level)
