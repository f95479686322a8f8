"""The smallest federation that has everything: convolutions, batch norms, a head, widths, uneven clients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fedfactor
from fedfactor.data import digits
from fedfactor.data.clients import FederatedData
from fedfactor.engines import Done, Inline, Job
from fedfactor.protocol.method import Method
from fedfactor.protocol.settings import Training
from fedfactor.protocol.setup import Setup
from fedfactor.registry import create, entries
from fedfactor.server.result import Result
from fedfactor.task import Task

METHODS = list(entries("methods"))
OPTIMIZERS = list(entries("optimizers"))
CODECS = list(entries("codecs"))

LEVELS = {1.0: 0.5, 0.5: 0.5}
FIELDS = {"pufferfish": {"warmup": 1}}
"""Settings of a method under which a short run shows all that it does."""


class Tiny(nn.Module):
    """Two convolutions with batch norm, a hidden layer and a classifier called `fc`."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        a, b, c = int(8 * width), int(16 * width), int(32 * width)
        self.conv1, self.bn1 = nn.Conv2d(1, a, 3, padding=1), nn.BatchNorm2d(a)
        self.conv2, self.bn2 = nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b)
        self.hidden, self.fc = nn.Linear(b * 16, c), nn.Linear(c, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = self.bn2(self.conv2(x)).relu()
        return self.fc(self.hidden(x.flatten(1)).relu())


@functools.cache
def data(even: bool = True) -> FederatedData:
    """Six clients of 40 digits each (uneven: 20 to 60)."""
    whole = digits(clients=1, seed=3)
    where = whole.train_of[0]
    edges = [0, 40, 80, 120, 160, 200, 240] if even else [0, 20, 60, 120, 150, 205, 240]
    parts = [where[a:b] for a, b in itertools.pairwise(edges)]
    assert whole.central is not None
    own = [torch.arange(20) + 20 * client for client in range(6)]
    return FederatedData(whole.train, parts, whole.central, own)


def task() -> Task:
    """The tiny network on the tiny data."""
    return Task(Tiny, data())


def run(method: Any = "fedavg", **settings: Any) -> Result:
    """Run two rounds of three out of six clients; every setting can be changed."""
    chosen: dict[str, Any] = {
        "rounds": 2, "cohort": 3, "epochs": _epochs(method), "batch_size": 10, "lr": 0.05, "seed": 5, "capacities": LEVELS,
    }  # fmt: skip
    chosen.update(settings)
    if isinstance(method, str):
        method = create("methods", method, **FIELDS.get(method, {}))
    return fedfactor.simulate(chosen.pop("model", Tiny), chosen.pop("data", data()), method=method, **chosen)


def _epochs(method: Any) -> int:
    """One epoch, or two for a method that splits them."""
    if isinstance(method, type):  # a mistake that `simulate` explains
        return 1
    made = create("methods", method) if isinstance(method, str) else method
    return 2 if made.refuses(create("optimizers", "fedavg"), create("codecs", "float32"), Training(epochs=1)) else 1


def decaying(method: Method, network: nn.Module) -> dict[str, bool]:
    """Return on which parameters weight decay acts."""
    (phase,) = method.phases(network, 1)
    return {name: group.weight_decay for group in phase.groups for name in group.names}


def refusal(method: str, optimizer: str, codec: str) -> str | None:
    """Return why a combination is refused, or `None`."""
    reason = create("methods", method).refuses(create("optimizers", optimizer), create("codecs", codec))
    assert reason is None or isinstance(reason, str)
    return reason


class Tampering(Inline):
    """An engine in which one client's replies go through a function on their way back."""

    def __init__(self, client: int, change: Any) -> None:
        object.__setattr__(self, "client", client)
        object.__setattr__(self, "change", change)

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        for done in super().run(setup, jobs):
            if done.client == self.client:  # type: ignore[attr-defined]
                done = self.change(done)  # type: ignore[attr-defined]
            if done is not None:
                yield done


class Recording(Inline):
    """An engine that keeps every message that went by."""

    def __init__(self) -> None:
        object.__setattr__(self, "down", [])
        object.__setattr__(self, "up", [])

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        def seen(jobs: Iterable[Job]) -> Iterator[Job]:
            for job in jobs:
                self.down.append(job.message)  # type: ignore[attr-defined]
                yield job

        for done in super().run(setup, seen(jobs)):
            self.up.append(done.reply)  # type: ignore[attr-defined]
            yield done
