"""The library in one call: a model, tensors, a method, and a plain model back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedfactor.data.clients import Examples, FederatedData, Kind
from fedfactor.data.splitting import dirichlet, iid
from fedfactor.engines import Engine, Inline
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.method import Method
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.settings import Capacities, Rounds, Training
from fedfactor.protocol.setup import Setup
from fedfactor.registry import create
from fedfactor.rng import numpy_rng
from fedfactor.server.federation import Federation
from fedfactor.server.result import Result
from fedfactor.server.store import DiskStore, Journal, MemoryStore
from fedfactor.task import Task


def simulate(
    model: nn.Module | Callable[..., nn.Module],
    data: FederatedData | Examples,
    *,
    test: Examples | None = None,
    clients: int = 10,
    alpha: float | None = None,
    method: str | Method = "fedavg",
    optimizer: str | Optimizer = "fedavg",
    codec: str | Codec = "float32",
    capacities: Mapping[float, float] | Capacities | None = None,
    kind: Kind = "classification",
    directory: Path | str | None = None,
    engine: Engine | None = None,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    **settings: Any,
) -> Result:
    """Train `model` on `data` split over clients, and return the finished run.

    `data` is a `FederatedData`, or inputs and targets that are split over `clients` (IID, or Dirichlet with `alpha`).
    `settings` are those of `Training` (epochs, batch_size, lr, momentum, seed, ...) and `Rounds` (rounds, cohort, ...).
    With a `directory` the run is committed there round by round, and a call with the same directory carries on.
    """
    for part in (method, optimizer, codec):
        if isinstance(part, type):
            raise TypeError(f"give an object, {part.__name__}(), or a name, not the class")
    training = {f.name for f in fields(Training)}
    rounds = {f.name for f in fields(Rounds)}
    for name in settings:
        if name not in training | rounds:
            raise TypeError(f"simulate() has no setting {name!r}; there are {', '.join(sorted(training | rounds))}")
    trained = Training(**{name: value for name, value in settings.items() if name in training})
    if isinstance(data, FederatedData):
        if test is not None or alpha is not None:
            raise TypeError("test and alpha are for inputs and targets; a FederatedData has its own split and test set")
    else:
        data = split(data, clients, test=test, alpha=alpha, seed=trained.seed)
    setup = Setup(
        Task(model, data, kind),
        create("methods", method) if isinstance(method, str) else method,
        create("optimizers", optimizer) if isinstance(optimizer, str) else optimizer,
        create("codecs", codec) if isinstance(codec, str) else codec,
        trained,
    )
    folder = Path(directory) if directory is not None else None
    federation = Federation(
        setup,
        Rounds(**{name: value for name, value in settings.items() if name in rounds}),
        engine or Inline(),
        capacities if isinstance(capacities, Capacities) else Capacities(capacities or {1.0: 1.0}),
        DiskStore(folder / "checkpoint") if folder else MemoryStore(),
        Journal(folder / "metrics.jsonl" if folder else None),
        on_event,
    )
    return Result(federation, federation.run())


def split(
    examples: Examples,
    clients: int,
    *,
    test: Examples | None = None,
    alpha: float | None = None,
    seed: int = 0,
) -> FederatedData:
    """Split inputs and targets over clients: evenly, or by Dirichlet(alpha) over the labels."""
    if clients > len(examples[1]):
        raise ValueError(f"{len(examples[1])} examples cannot be split over {clients} clients")
    FederatedData(examples, [torch.arange(len(examples[1]))])  # says what is wrong with them
    labels, rng = examples[1].long().flatten().numpy(), numpy_rng(seed, "partition")
    parts = iid(labels, clients, rng) if alpha is None else dirichlet(labels, clients, alpha, rng)
    return FederatedData(examples, [torch.from_numpy(part) for part in parts], test)
