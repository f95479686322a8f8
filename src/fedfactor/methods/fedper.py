"""FedPer: personal last layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from fedfactor.methods.fedavg import FedAvg
from fedfactor.registry import described, register
from fedfactor.task import Task


@register("methods", "fedper", paper="arXiv:1912.00818")
@dataclass(frozen=True)
class FedPer(FedAvg):
    """The last layers stay on the client; body and head train together, and the body is averaged by data.

    Definition not re-read in the paper, whose code is not public.

    Use it where clients label things differently, or have few of the classes: the simplest of the personal methods,
    and the one to beat. New clients start with the first model's head.
    """

    head: str = field(default="fc", metadata=described("prefix of the private layers; empty: none"))

    def private(self, name: str) -> bool:
        """The head and all below it are private."""
        return name.startswith(f"{self.head}.") and bool(self.head)

    def check(self, task: Task, network: nn.Module) -> None:
        """Refuse a head that is not there: the method would silently be FedAvg."""
        if self.head and not self.private_names(network):
            children = ", ".join(name for name, _ in network.named_children())
            raise ValueError(f"the model has no layer {self.head!r} to keep private; its layers are {children}")
