"""Width slimming: all clients train the network of the smallest capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from torch import nn

from fedfactor.protocol.method import Method
from fedfactor.registry import described, register
from fedfactor.task import Build, Task


@register("methods", "slim", paper="arXiv:2111.14655")
@dataclass(frozen=True)
class Slim(Method):
    """FedAvg on the task's model at one width, the smallest of the run's capacities: FedHM's "Width Slimming (FedAvg)".

    The server has only this network, whatever the larger capacities are.

    Use it as the baseline for all methods for devices of different capacity: one model that fits all of them.
    """

    untunable: ClassVar[str] = "it trains a narrower network, but a frozen base is whole"

    width: float = field(
        default=0.0,
        metadata=described(
            "width of the network; 0: the smallest capacity",
            tries=(1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625),
        ),
    )

    def __post_init__(self) -> None:
        if not 0 <= self.width <= 1:
            raise ValueError(f"width must lie in (0, 1], or be 0 for the smallest capacity, got {self.width:g}")

    def bind(self, task: Task, levels: Sequence[float]) -> Self:
        """Set the width to the smallest capacity, or check that it is not larger."""
        if self.width > min(levels):
            raise ValueError(
                f"a client of capacity {min(levels):g} cannot train a network of width {self.width:g}; lower `width`"
            )
        return replace(self, width=self.width or min(levels))

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model at the one width."""
        return build(self.width)

    def trained_capacity(self, capacity: float) -> float:
        """Return the one width that there is."""
        return self.width
