"""FedProx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from fedfactor.protocol.context import Context
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.registry import described, register


@register("optimizers", "fedprox", paper="arXiv:1812.06127")
@dataclass(frozen=True)
class FedProx(Optimizer):
    """Clients minimise f_i(w) + (mu / 2) ||w - w_t||^2 around the model they received.

    Follows the authors' code.

    Use it where clients differ or do unequal amounts of work, and cannot keep a state.
    """

    mu: float = field(default=0.1, metadata=described("strength of the proximal term; 0 is FedAvg"))
    anchors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise ValueError(f"mu must be at least 0, got {self.mu:g}")

    def correct(self, parameters: Mapping[str, nn.Parameter], ctx: Context) -> None:
        """Add mu (w - w_t) to the gradient of each downloaded parameter."""
        for name, parameter in parameters.items():
            if name in ctx.down and parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - ctx.down[name], alpha=self.mu)
