"""FedAdam."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fedfactor.protocol.optimizer import Optimizer, State, Step, is_held
from fedfactor.protocol.plan import Tensors
from fedfactor.registry import described, register


@register("optimizers", "fedadam", paper="arXiv:2003.00295")
@dataclass(frozen=True)
class FedAdam(Optimizer):
    """The server steps by Adam along the mean change of the clients.

    Definition not re-read in the paper: no bias correction, v starts at tau^2. Only weights step; batch statistics are
    averaged, since Adam could make a variance negative. Elements that nobody held keep value and moments.

    Use it where plain averaging moves slowly, with sparse gradients say; `server_lr` has to be found.
    """

    server_lr: float = field(default=0.01, metadata=described("eta, the server's step"))
    beta1: float = field(default=0.9, metadata=described("decay of the first moment"))
    beta2: float = field(default=0.99, metadata=described("decay of the second moment"))
    tau: float = field(default=1e-3, metadata=described("adaptivity; added to the root of the second moment"))

    def __post_init__(self) -> None:
        if self.tau <= 0:
            raise ValueError(f"tau must be above 0, got {self.tau:g}")

    def start(self, weights: Tensors) -> State:
        """m = 0, v = tau^2."""
        return {
            "m": {name: torch.zeros_like(weight) for name, weight in weights.items()},
            "v": {name: torch.full_like(weight, self.tau**2) for name, weight in weights.items()},
        }

    def step(self, step: Step) -> tuple[Tensors, State]:
        """m, v <- moments of the mean change; x <- x + eta m / (sqrt v + tau)."""
        stepped: Tensors = {}
        m, v = dict(step.state["m"]), dict(step.state["v"])
        for name, x in step.server.items():
            change, mask = step.mean[name] - x, is_held(step.held[name], x)
            first = self.beta1 * m[name] + (1 - self.beta1) * change
            second = self.beta2 * v[name] + (1 - self.beta2) * change**2
            m[name], v[name] = torch.where(mask, first, m[name]), torch.where(mask, second, v[name])
            stepped[name] = torch.where(mask, x + self.server_lr * first / (second.sqrt() + self.tau), x)
        return stepped, {"m": m, "v": v}
