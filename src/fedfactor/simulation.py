"""The library in one call: a model, tensors, a method, and a plain model back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedfactor.client import Setup
from fedfactor.data.partition import dirichlet, iid
from fedfactor.engines import Engine, Inline
from fedfactor.evaluation import summary
from fedfactor.federation import Federation, Server, private_sha256, weights_sha256
from fedfactor.methods.base import Method
from fedfactor.optimizers.base import Optimizer
from fedfactor.registry import create
from fedfactor.rng import numpy_rng
from fedfactor.settings import Capacities, Rounds, Training
from fedfactor.store import DiskStore, Journal, MemoryStore
from fedfactor.task import Examples, FederatedData, Kind, Task
from fedfactor.wire import Codec


@dataclass
class Result:
    """A finished run."""

    federation: Federation
    server: Server

    @property
    def model(self) -> nn.Module:
        """The server's model at its largest capacity, as a plain module."""
        return self.federation.model(self.server)

    def model_at(self, capacity: float) -> nn.Module:
        """The server's model at a capacity, as a plain module."""
        return self.federation.model(self.server, capacity)

    def client_model(self, client: int) -> nn.Module:
        """A client's own model, as a plain module."""
        return self.federation.client_model(self.server, client)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One event a round, with costs and measurements."""
        return self.federation.journal.events

    @property
    def summary(self) -> dict[str, Any]:
        """Last and best accuracy, totals, and what identifies the run to the bit."""
        return {
            **summary(self.history, self.federation.rounds.target),
            "weights_sha256": weights_sha256(self.server.tensors),
            "private_sha256": private_sha256(self.federation.store),
        }

    def __str__(self) -> str:
        """What was measured, how, and what it cost, as a few lines of text."""
        found, protocol = self.summary, self.history[0]["protocol"]
        lines = [f"{self.federation.setup.method} after {found['rounds']} rounds"]
        last: dict[str, Any] = next((event for event in reversed(self.history) if set(MEASURED) & set(event)), {})
        for key, meaning in MEASURED.items():
            if key in found:
                score = found[key]
                best = f"best {score['best']:.4f} in round {score['best_round']}"
                lines.append(f"{key}: accuracy {score['final']:.4f} ({best}); {protocol[meaning]}")
                lines += [f"  {line}" for line in _details(last.get(key, {}))]
        totals = found["totals"]
        if totals:
            lines.append(
                f"bytes up {totals['bytes_up']:,}, bytes down {totals['bytes_down']:,}; MACs {totals['macs']:,}"
            )
            lines.append(f"failures {totals['failures']:,}")
        return "\n".join(lines)


MEASURED = {"global": "global", "all": "clients", "selected_before": "clients", "selected_after": "clients"}
"""Which line of the protocol explains a measurement."""


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
    `settings` are those of `Training` (epochs, batch, lr, momentum, seed, ...) and `Rounds` (rounds, cohort, ...). With
    a `directory` the run is committed there round by round, and a call with the same directory carries on.
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
        capacities if isinstance(capacities, Capacities) else Capacities(capacities or {1.0: 1.0}),
        engine or Inline(),
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


def _details(scores: dict[str, Any]) -> list[str]:
    """Spell a measurement out: a line a capacity, or the spread over clients."""
    if "each" in scores:
        words = [f"{key} {scores[key]:.4f}" for key in ("loss", "perplexity", "std", "worst_decile") if key in scores]
        return [f"{', '.join(words)} over {scores['clients']} clients"]
    return [
        f"at capacity {level}: " + ", ".join(f"{key} {value:.4f}" for key, value in score.items() if key != "examples")
        for level, score in scores.items()
    ]
