"""A federation small enough to test a method in seconds, and engines that record or change its messages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedfactor.data.clients import FederatedData
from fedfactor.engines import Done, Inline, Job
from fedfactor.protocol.message import Bytes
from fedfactor.protocol.method import Method
from fedfactor.protocol.settings import Training
from fedfactor.protocol.setup import Setup
from fedfactor.registry import create
from fedfactor.runs.simulate import simulate
from fedfactor.server.result import Result

CLIENTS = 6
LEVELS = {1.0: 0.5, 0.5: 0.5}


class SmallNet(nn.Module):
    """Two convolutions with batch norm, a hidden layer and a classifier called `fc`, at any width."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        a, b, c = int(8 * width), int(16 * width), int(32 * width)
        self.conv1, self.bn1 = nn.Conv2d(1, a, 3, padding=1), nn.BatchNorm2d(a)
        self.conv2, self.bn2 = nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b)
        self.hidden, self.fc = nn.Linear(b * 16, c), nn.Linear(c, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images, N x 1 x 8 x 8."""
        x = self.bn1(self.conv1(x)).relu()
        x = self.bn2(self.conv2(x)).relu()
        logits: Tensor = self.fc(self.hidden(x.flatten(1)).relu())
        return logits


@functools.cache
def data(even: bool = True, tested: bool = True) -> FederatedData:
    """Return images of ten made-up classes: 40 for each of six clients (uneven: 20 to 60), and 20 to test each.

    Without `tested`, there are none to test.
    """
    rng = torch.Generator().manual_seed(3)
    labels = torch.randint(10, (360,), generator=rng)
    images = torch.rand(10, 1, 8, 8, generator=rng)[labels] + 0.3 * torch.randn(360, 1, 8, 8, generator=rng)
    edges = [0, 40, 80, 120, 160, 200, 240] if even else [0, 20, 60, 120, 150, 205, 240]
    parts = [torch.arange(a, b) for a, b in itertools.pairwise(edges)]
    if not tested:
        return FederatedData((images[:240], labels[:240]), parts)
    own = [torch.arange(20) + 20 * client for client in range(CLIENTS)]
    return FederatedData((images[:240], labels[:240]), parts, (images[240:], labels[240:]), own)


def run(method: str | Method = "fedavg", **settings: Any) -> Result:
    """Run two rounds with three of six clients, half of which have half the capacity.

    Any parameter of `fedfactor.simulate` can be changed, `model` and `data` included.
    """
    chosen = {
        "model": SmallNet, "data": data(), "rounds": 2, "cohort": 3, "epochs": _epochs(method), "batch_size": 10,
        "lr": 0.05, "seed": 5, "capacities": LEVELS, **settings,
    }  # fmt: skip
    return simulate(chosen.pop("model"), chosen.pop("data"), method=method, **chosen)


def _epochs(method: str | Method) -> int:
    """Return one epoch, or two for a method that splits them."""
    made = create("methods", method) if isinstance(method, str) else method
    if isinstance(made, type):  # a mistake that `simulate` explains
        return 1
    return 2 if made.refuses(create("optimizers", "fedavg"), create("codecs", "float32"), Training(epochs=1)) else 1


def outcome(result: Result) -> dict[str, Any]:
    """Return what two runs with the same settings have in common: all but the time that they took."""
    events = [{key: value for key, value in event.items() if "seconds" not in key} for event in result.history]
    found = result.summary
    return {"weights": found["weights_sha256"], "private": found["private_sha256"], "events": events}


@dataclass(frozen=True)
class Recording(Inline):
    """An engine that keeps the messages to clients (`down`) and from them (`up`)."""

    down: list[Bytes] = field(default_factory=list)
    up: list[Bytes] = field(default_factory=list)

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Run the jobs in order."""

        def seen(jobs: Iterable[Job]) -> Iterator[Job]:
            for job in jobs:
                self.down.append(job.message)
                yield job

        for done in super().run(setup, seen(jobs)):
            if done.reply is not None:
                self.up.append(done.reply)
            yield done


@dataclass(frozen=True)
class Tampering(Inline):
    """An engine that changes what one client answers; the client does not answer if `change` returns `None`."""

    client: int
    change: Callable[[Done], Done | None]

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Run the jobs in order."""
        for done in super().run(setup, jobs):
            found = self.change(done) if done.client == self.client else done
            if found is not None:
                yield found
