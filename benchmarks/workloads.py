"""The workloads that engines, the plain loop and the peers are timed on; this file needs torch alone.

Data is random in the shape of the real sets: nobody's time depends on what is in a picture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model and equal clients: client c has the rows c * samples and on."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    users: int
    samples: int
    cohort: int
    batch: int
    lr: float
    classes: int = 10

    def model(self) -> nn.Module:
        """Build the model from a fixed seed."""
        torch.manual_seed(0)
        return self.build()

    def data(self) -> tuple[Tensor, Tensor]:
        """Make all clients' inputs (float32) and labels."""
        rng = torch.Generator().manual_seed(0)
        count = self.users * self.samples
        return torch.randn(count, *self.shape, generator=rng), torch.randint(self.classes, (count,), generator=rng)

    def rows(self, client: int) -> Tensor:
        """Return where a client's examples are."""
        return torch.arange(client * self.samples, (client + 1) * self.samples)


def cifar_net() -> nn.Module:
    """The network of pfl-research's published CIFAR-10 benchmark: 1,626,442 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def logistic() -> nn.Module:
    """Logistic regression on pictures of MNIST's size."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


CIFAR = Workload("cifar", cifar_net, (3, 32, 32), users=1000, samples=50, cohort=50, batch=10, lr=0.1)
LOGISTIC = Workload("logistic", logistic, (1, 28, 28), users=1000, samples=60, cohort=10, batch=10, lr=0.1)
WORKLOADS = {work.name: work for work in (CIFAR, LOGISTIC)}
