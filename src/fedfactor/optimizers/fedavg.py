"""Plain averaging."""

from __future__ import annotations

from dataclasses import dataclass

from fedfactor.protocol.optimizer import Optimizer
from fedfactor.registry import register


@register("optimizers", "fedavg", paper="arXiv:1602.05629")
@dataclass(frozen=True)
class FedAvgOptimizer(Optimizer):
    """Clients take SGD steps, and the server takes the mean of their models.

    Use it first: the others are refinements of it.
    """
