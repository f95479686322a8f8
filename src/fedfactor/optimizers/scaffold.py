"""SCAFFOLD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from fedfactor.protocol.context import Context
from fedfactor.protocol.optimizer import Optimizer, State, Step
from fedfactor.protocol.plan import Tensors
from fedfactor.registry import described, register


@register("optimizers", "scaffold", paper="arXiv:1910.06378")
@dataclass(frozen=True)
class Scaffold(Optimizer):
    """Control variates c (server) and c_i (client) correct the drift of the clients' steps (option II).

    Control variates are sent in full precision with any codec, which doubles the traffic of a float32 model. K eta is
    the distance that a constant gradient of one would have moved a parameter, so that momentum does not inflate the
    control variates.

    Follows re-implementations, which agree on the client's step; the authors published no code.

    Use it where clients differ and take part often, and twice the bytes are acceptable.
    """

    server_lr: float = field(default=1.0, metadata=described("eta_g, the server's learning rate"))
    keeps_state: ClassVar[bool] = True
    needs_sgd: ClassVar[bool] = True
    uniform: ClassVar[bool] = True

    def start(self, weights: Tensors) -> State:
        """Return c = 0. All c_i start at zero too: if their mean differed from c, it always would."""
        return {"c": {name: torch.zeros_like(weight) for name, weight in weights.items()}}

    def broadcast(self, state: State) -> Tensors:
        """Return c."""
        return state["c"]

    def expected(self, down: Tensors) -> Tensors:
        """Return tensors like the changes of c_i, which have the shapes of c."""
        return down

    def correct(self, parameters: Mapping[str, nn.Parameter], ctx: Context) -> None:
        """Correct the gradient for the step y <- y - eta (g_i(y) - c_i + c)."""
        for name, parameter in parameters.items():
            if name in ctx.extras and parameter.grad is not None:
                parameter.grad.add_(ctx.extras[name])
                if name in ctx.state:
                    parameter.grad.sub_(ctx.state[name])

    def finish(self, shared: Tensors, ctx: Context) -> tuple[Tensors, Tensors]:
        """Compute c_i+ = c_i - c + (x - y) / (K eta); return its change, which is uploaded, and c_i+."""
        new, change = {}, {}
        for name, c in ctx.extras.items():
            old = ctx.state.get(name, torch.zeros_like(c))
            if ctx.travel.get(name, 0.0) == 0.0:  # not trained in this round, so nothing is known about its gradient
                new[name], change[name] = old, torch.zeros_like(c)
                continue
            new[name] = old - c + (ctx.down[name] - shared[name]) / ctx.travel[name]
            change[name] = new[name] - old
        return change, new

    def step(self, step: Step) -> tuple[Tensors, State]:
        """Update x <- x + eta_g mean(y_i - x); c <- c + (1 / N) sum of the changes, N being the population."""
        stepped = {name: x + self.server_lr * (step.mean[name] - x) for name, x in step.server.items()}
        c = dict(step.state["c"])
        for name, change in step.extras.items():
            c[name] = c[name] + change / step.population
        return stepped, {"c": c}
