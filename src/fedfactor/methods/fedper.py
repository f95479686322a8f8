"""FedPer: personal last layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from fedfactor.methods.fedavg import FedAvg
from fedfactor.nn.state import tensors_of
from fedfactor.registry import described, register
from fedfactor.task import Build


@register("methods", "fedper", paper="arXiv:1912.00818")
@dataclass(frozen=True)
class FedPer(FedAvg):
    """The last layers (head) stay on the client; the others (body) are averaged. Both are trained together.

    Follows the paper's definition as other implementations have it; the authors published no code. The mean is weighted
    by examples.

    Use it where clients label differently or have few of the classes. It is the simplest personal method, and so the
    baseline for the others. New clients start with the head of the initial model.
    """

    head: str = field(default="fc", metadata=described("name prefix of the private layers; empty: none"))

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model. Raise ValueError if it has no such head: the method would silently be FedAvg."""
        model = build(1.0)
        if self.head and not self.private_names(model):
            children = ", ".join(name for name, _ in model.named_children())
            raise ValueError(f"the model has no layer {self.head!r} to keep private; its layers are {children}")
        return model

    def private_names(self, network: nn.Module) -> set[str]:
        """Return the names of the head's tensors."""
        return {name for name in tensors_of(network) if self.head and name.startswith(f"{self.head}.")}
