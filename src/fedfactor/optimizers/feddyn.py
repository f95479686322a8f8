"""FedDyn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.context import Context
from fedfactor.protocol.optimizer import Optimizer, State, Step, is_held
from fedfactor.protocol.plan import Tensors
from fedfactor.registry import described, register


@register("optimizers", "feddyn", paper="arXiv:2111.04263")
@dataclass(frozen=True)
class FedDyn(Optimizer):
    """Clients minimise L_i(w) - <g_i, w> + (alpha / 2) ||w - x||^2; the server corrects its mean by h / alpha.

    No setting makes this FedAvg: the correction stays as alpha goes to 0. A round without training steps still changes
    the server by -h / alpha, unless h is zero.

    Follows the authors' code, in the notation of the paper. The bracket in the server's update is read as the sum of
    (w_i - x).

    Deviations: the code scales alpha per client when clients have different numbers of examples; here alpha is the same
    for all.

    Use it where clients differ, take part often and can keep one tensor per weight.
    """

    alpha: float = field(default=0.1, metadata=described("strength of the dynamic regularisation, greater than 0"))
    keeps_state: ClassVar[bool] = True
    anchors: ClassVar[bool] = True
    needs_sgd: ClassVar[bool] = True
    uniform: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.alpha <= 0:
            raise ValueError(f"alpha must be above 0, got {self.alpha:g}")

    def refuses(self, codec: Codec) -> str | None:
        """Refuse codecs that delay changes: a late change feeds back through h / alpha and grows."""
        if codec.keeps_state:
            return f"feddyn amplifies the changes that {codec.name} delays to later rounds, and training diverges"
        return None

    def start(self, weights: Tensors) -> State:
        """Return h = 0."""
        return {"h": {name: torch.zeros_like(weight) for name, weight in weights.items()}}

    def correct(self, parameters: Mapping[str, nn.Parameter], ctx: Context) -> None:
        """Add -g_i + alpha (w - x) to the gradient."""
        for name, parameter in parameters.items():
            if name in ctx.down and parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - ctx.down[name], alpha=self.alpha)
                if name in ctx.state:
                    parameter.grad.sub_(ctx.state[name])

    def finish(self, shared: Tensors, ctx: Context) -> tuple[Tensors, Tensors]:
        """Update g_i <- g_i - alpha (w_i - x)."""
        trained = [name for name in shared if name in ctx.travel]
        moved = {name: self.alpha * (shared[name] - ctx.down[name]) for name in trained}
        return {}, {**ctx.state, **{name: ctx.state.get(name, 0.0) - moved[name] for name in trained}}

    def step(self, step: Step) -> tuple[Tensors, State]:
        """Update h <- h - (alpha / m) sum (w_i - x), m being the population; x <- mean w_i - h / alpha."""
        stepped, h = {}, {}
        for name, x in step.server.items():
            mean, held = step.mean[name], step.held[name]
            h[name] = step.state["h"][name] - self.alpha / step.population * held * (mean - x)
            stepped[name] = torch.where(is_held(held, x), mean - h[name] / self.alpha, x)
        return stepped, {"h": h}
