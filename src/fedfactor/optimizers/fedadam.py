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
    """The server takes an Adam step along the clients' mean change.

    There is no bias correction, and v starts at tau^2. Only weights take Adam steps; batch statistics are averaged,
    because Adam could make a variance negative. Elements that no client held keep their value and moments.

    Follows the update as re-implementations have it, without the bias correction of Flower's. `server_lr`, `beta1` and
    `beta2` are FedPara's (Table 3), which gives no tau; `tau` is Flower's.

    Use it where plain averaging converges slowly, for example with sparse gradients. `server_lr` has to be tuned.
    """

    server_lr: float = field(default=0.01, metadata=described("eta, the server's learning rate"))
    beta1: float = field(default=0.9, metadata=described("decay of the first moment"))
    beta2: float = field(default=0.99, metadata=described("decay of the second moment"))
    tau: float = field(default=1e-3, metadata=described("added to the square root of the second moment"))

    def __post_init__(self) -> None:
        if self.tau <= 0:
            raise ValueError(f"tau must be above 0, got {self.tau:g}")

    def start(self, weights: Tensors) -> State:
        """Return m = 0 and v = tau^2."""
        return {
            "m": {name: torch.zeros_like(weight) for name, weight in weights.items()},
            "v": {name: torch.full_like(weight, self.tau**2) for name, weight in weights.items()},
        }

    def step(self, step: Step) -> tuple[Tensors, State]:
        """Update m and v, the moments of the mean change; x <- x + eta m / (sqrt v + tau)."""
        stepped: Tensors = {}
        m, v = dict(step.state["m"]), dict(step.state["v"])
        for name, x in step.server.items():
            change, mask = step.mean[name] - x, is_held(step.held[name], x)
            first = self.beta1 * m[name] + (1 - self.beta1) * change
            second = self.beta2 * v[name] + (1 - self.beta2) * change**2
            m[name], v[name] = torch.where(mask, first, m[name]), torch.where(mask, second, v[name])
            stepped[name] = torch.where(mask, x + self.server_lr * first / (second.sqrt() + self.tau), x)
        return stepped, {"m": m, "v": v}
