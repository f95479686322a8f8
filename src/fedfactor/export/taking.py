"""A run's model as a plain network, compared with the network as it was trained."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedfactor.data.batches import filled, outline
from fedfactor.data.clients import Examples, count
from fedfactor.nn.norms import batch_norms, watched_norms, with_statistics
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.method import Participant
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.setup import kept_of
from fedfactor.protocol.states import HeldTensors
from fedfactor.rng import numpy_rng
from fedfactor.runs.open import Run
from fedfactor.runs.tasks import Facts
from fedfactor.server.federation import Federation
from fedfactor.server.result import Result
from fedfactor.server.state import Server
from fedfactor.task import Batch, Task, arguments, like, logits_of

CHECKED = 64
"""Examples of the batch on which models are compared."""
APART = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference of two outputs, as a share of the largest output: the order of a sum changes less."""
FROZEN_ON = 10_000
"""Most training examples on which norm statistics are estimated, in batches of `FROZEN_BATCH`."""
FROZEN_BATCH = 500
"""Batch size of the estimate."""


class ExportError(RuntimeError):
    """The model of a run cannot be exported as asked."""


@dataclass(frozen=True)
class Taken:
    """A plain model and what is known about it."""

    model: nn.Module
    trained: nn.Module
    """The network as it was trained."""
    run: Run
    facts: Facts
    """What is known about the task."""
    result: Result
    capacity: float
    client: int | None
    batch: Batch
    """A batch to compare on: one tensor, unless an adapter is exported."""
    batch_of: str
    """What they are, in words."""
    norms: str
    """What the norm statistics are, in words; empty without batch norms."""
    difference: float
    scores: dict[str, float]
    """Measured on `tested`."""
    tested: str


def take(
    run: Run,
    capacity: float | None,
    client: int | None,
    data_dir: Path | str | None,
    with_data: bool,
    one_tensor: bool = True,
) -> Taken:
    """Compose a run's model and compare it with the network as trained; `one_tensor`: refuse other inputs."""
    if not run.recipe.method.traits.plain:
        raise ExportError(
            f"{run.recipe.method.name}'s weights depend on the batch: the output for an input changes with the rest "
            "of its batch, so there is no plain model to write; fedfactor.load(DIR).model(client=...) opens it as it is"
        )
    client = run.meant_client(client)
    with_data = with_data and not run.recipe.from_python
    task, facts = run.loaded_task(data_dir) if with_data else (run.task_without_data(), run.task)
    result = run.rebuilt(task)
    federation, server = result.federation, result.server
    level = _level(federation, server, capacity, client)
    who = Participant(-1 if client is None else client, level, server.round)
    batch, batch_of = _batch(federation.setup.task, client, with_data, one_tensor)
    _check_norms(run, federation, server, who, with_data)
    plain = result.model_at(level) if client is None else result.client_model(client)
    plain = copy.deepcopy(plain).eval()  # the federation reuses its networks
    trained = _as_trained(federation, server, who).eval()
    batch = like(batch, next(iter(plain.parameters()), torch.zeros(())))
    apart = difference(answers(plain, batch), answers(trained, batch))
    if apart > limit(plain):
        raise ExportError(
            f"the composed model differs from the trained one by {apart:.1e} of its largest output: nothing was written"
        )
    if next((p.dtype for p in plain.parameters()), None) == torch.bfloat16:
        plain, trained = plain.float(), trained.float()  # exact, and all formats have it
        batch = like(batch, torch.zeros(()))
    norms = _frozen(plain, federation, client, calibrated=run.recipe.method.traits.calibrates)
    scores, tested = _scores(federation.setup.task, plain, client) if with_data else ({}, "")
    return Taken(plain, trained, run, facts, result, level, client, batch, batch_of, norms, apart, scores, tested)


def _level(federation: Federation, server: Server, capacity: float | None, client: int | None) -> float:
    """Return the capacity of the model that is asked for, or say why there is none."""
    setup, levels = federation.setup.at(server.round), federation.capacities.levels
    method = setup.method
    if client is not None:
        own = federation.dispatch.participant(client, server.round).capacity
        if capacity not in (None, own):
            raise ExportError(f"client {client} has capacity {own:g}; leave --capacity out, or --client")
        return own
    if not setup.has_global_model:
        why = "every client has its own" if method.traits.space == "personal" else "a part of every model is private"
        raise ExportError(
            f"{method.name} has no server's model: {why}; choose a client with --client 0 to "
            f"{federation.population - 1}"
        )
    served = method.served(levels)
    if capacity is not None and capacity not in served:
        known = ", ".join(f"{level:g}" for level in served)
        same = "" if method.traits.adapts else f" ({method.name} has one network, whatever the capacity)"
        raise ExportError(f"capacity {capacity:g} was not trained; there is {known}{same}")
    return served[0] if capacity is None else capacity


def _as_trained(federation: Federation, server: Server, who: Participant) -> nn.Module:
    """Fill the network that a client trains as the client does, without the rounding of a codec."""
    setup, store = federation.setup.at(server.round), federation.store
    method, network = setup.method, copy.deepcopy(setup.network(who.capacity))
    setup.move(network, server.moves.total)
    view = method.prepare(server.silenced(), {who.capacity: network}, training=False)
    plan = method.plan(view, who, network, None)
    down = method.download(view, who, plan, HeldTensors(store, "server"), network)
    kept: Tensors
    if who.client < 0:
        # The server's model has no private part of a client: zeros are added.
        kept = {name: torch.zeros_like(tensors_of(network)[name]) for name in method.private_names(network)}
    else:
        state = kept_of(federation.setup, store.read("client", who.client), server.round)
        kept = state.get("kept") or setup.kept(who.capacity)
    method.load(network, down, kept, training=False)
    calibration = federation.calibration(server)
    if setup.training.own_norms and who.client >= 0:
        return with_statistics(network, calibration.of(who))
    return with_statistics(network, calibration.at(who.capacity)) if method.traits.calibrates else network


def _batch(task: Task, client: int | None, with_data: bool, one_tensor: bool) -> tuple[Batch, str]:
    """Return inputs to compare models on, and what they are."""
    data = task.data
    if not data.takes_tensor and one_tensor:
        raise ExportError(
            "only models whose input is one tensor can be exported; fedfactor.load(DIR).model() opens others in Python"
        )
    if not data.takes_tensor and not with_data:
        known = outline(data.batch(data.train, slice(1)))
        return filled(known, CHECKED, 1), "inputs that are all 1, because the data was not loaded"
    if not with_data:
        example, rng = data.example, torch.Generator().manual_seed(0)
        shape = (CHECKED, *example.shape)
        if example.is_floating_point():
            return torch.randn(
                shape, generator=rng, dtype=example.dtype
            ), "random inputs, because the data was not loaded"
        return torch.randint(
            2, shape, generator=rng, dtype=example.dtype
        ), "random tokens, because the data was not loaded"
    examples, what = _tests(task, client)
    if examples is None:
        examples, what = data.of(client or 0), f"training examples of client {client or 0}"
    batch, number = data.batch(examples, slice(CHECKED)), min(CHECKED, count(examples))
    return arguments(batch)[0][0] if data.takes_tensor else batch, f"{number} of the {what}"


def _tests(task: Task, client: int | None) -> tuple[Examples | None, str]:
    if client is None:
        return task.data.central, "central test examples"
    return task.data.own_test(client), f"test examples of client {client}"


def _scores(task: Task, model: nn.Module, client: int | None) -> tuple[dict[str, float], str]:
    examples, what = _tests(task, client)
    return ({}, "") if examples is None else (task.evaluate(model, examples), what)


def answers(model: nn.Module, batch: Batch) -> Tensor:
    """Run a model on a batch."""
    args, named = arguments(batch)
    with torch.no_grad():
        return logits_of(model(*args, **named))


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two outputs as a share of the largest output."""
    if ours.shape != theirs.shape:
        raise ExportError(f"the outputs have shapes {list(ours.shape)} and {list(theirs.shape)}")
    scale = float(theirs.double().abs().max())
    return float((ours.double() - theirs.double()).abs().max()) / max(scale, torch.finfo(torch.float32).tiny)


def limit(model: nn.Module) -> float:
    """Return the largest difference that two ways of computing a model's answers may have."""
    return APART[next((p.dtype for p in model.parameters()), torch.float32)]


# Batch norms without running statistics. An exported model must give one input the same output in any batch.


def _loose(model: nn.Module) -> list[str]:
    """Return the batch norms without statistics of their own."""
    return [name for name, norm in batch_norms(model).items() if norm.running_mean is None]


def _check_norms(run: Run, federation: Federation, server: Server, who: Participant, with_data: bool) -> None:
    setup, level = federation.setup.at(server.round), who.capacity
    if setup.training.own_norms and who.client >= 0 and not with_data:
        raise ExportError("train.own_norms: norm statistics come from the client's own data: export with the data")
    loose = _loose(setup.network(level))
    if with_data or not loose or (setup.method.traits.calibrates and level in server.statistics):
        return
    raise ExportError(
        f"{loose[0]} and the other batch norms of {run.directory} keep no statistics; they are estimated on training "
        "data: export with the data"
    )


def _frozen(model: nn.Module, federation: Federation, client: int | None, *, calibrated: bool) -> str:
    """Give fixed statistics, estimated on training data, to batch norms that have none; describe the statistics."""
    if not batch_norms(model):
        return ""
    if calibrated:
        return "estimated on all clients' training data after training, and frozen"
    if federation.setup.training.own_norms and client is not None:
        return f"estimated on the training data of client {client} after the last download"
    if not _loose(model):
        return "collected during training, and averaged like weights where they are shared"
    setup, data = federation.setup, federation.setup.task.data
    if client is not None:
        rows = data.train_of[client]
    else:
        rows = torch.cat([data.train_of[one] for one in federation.rounds.measured(setup.training.seed, data.clients)])
    # In mixed order: a batch of one client alone would have the statistics of that client.
    order = numpy_rng(setup.training.seed, "frozen norms").permutation(len(rows))[:FROZEN_ON]
    rows, first = rows[torch.from_numpy(order)], next(iter(model.parameters()))
    with torch.no_grad(), watched_norms(model) as statistics:
        for part in torch.split(rows, FROZEN_BATCH):
            federation.setup.task.outputs(model, like(data.batch(data.train, part), first))
    with_statistics(model, statistics())
    whose = "of all clients" if client is None else f"of client {client}"
    return (
        f"estimated on {len(rows):,} training examples {whose} and frozen; in the run itself, training and scores used "
        "the statistics of each batch"
    )
