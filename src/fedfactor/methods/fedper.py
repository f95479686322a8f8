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
    """The last layers stay on the client; body and head train together, and the body is averaged by data.

    Definition not re-read in the paper, whose code is not public.

    Use it where clients label things differently, or have few of the classes: the simplest of the personal methods,
    and the one to beat. New clients start with the first model's head.
    """

    head: str = field(default="fc", metadata=described("prefix of the private layers; empty: none"))

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model; one without this head is refused, since the method would silently be FedAvg."""
        model = build(1.0)
        if self.head and not self.private_names(model):
            children = ", ".join(name for name, _ in model.named_children())
            raise ValueError(f"the model has no layer {self.head!r} to keep private; its layers are {children}")
        return model

    def private_names(self, network: nn.Module) -> set[str]:
        """The head and all below it."""
        return {name for name in tensors_of(network) if self.head and name.startswith(f"{self.head}.")}
