"""Width slimming: everybody trains the network that the weakest can carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from torch import nn

from fedfactor.protocol.method import Method
from fedfactor.registry import described, register
from fedfactor.task import Build, Task


@register("methods", "slim", paper="arXiv:2111.14655")
@dataclass(frozen=True)
class Slim(Method):
    """FedAvg on the task's model at one width, the smallest of the run's capacities: FedHM's "Width Slimming (FedAvg)".

    The server has this network only, whatever the capacities of the others.

    Use it as the baseline of every method for unequal devices: what the weakest can carry, for all.
    """

    width: float = field(
        default=0.0,
        metadata=described(
            "width of everybody's network; 0: the smallest capacity",
            tries=(1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625),
        ),
    )

    def __post_init__(self) -> None:
        if not 0 <= self.width <= 1:
            raise ValueError(f"width must lie in (0, 1], or be 0 for the smallest capacity, got {self.width:g}")

    def bind(self, task: Task, levels: Sequence[float]) -> Self:
        """Find the smallest capacity."""
        if self.width > min(levels):
            raise ValueError(f"a client of capacity {min(levels):g} cannot carry a network of width {self.width:g}")
        return replace(self, width=self.width or min(levels))

    def served(self, levels: Sequence[float]) -> list[float]:
        """There is one network."""
        return [self.width]

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Build the task's model at the one width."""
        return build(self.width)
