"""FedPer: personal last layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedfactor.methods.fedavg import FedAvg
from fedfactor.registry import described, register


@register("methods", "fedper", paper="arXiv:1912.00818")
@dataclass(frozen=True)
class FedPer(FedAvg):
    """The last layers stay on the client; body and head train together."""

    head: str = field(default="fc", metadata=described("prefix of the private layers"))

    def private(self, name: str) -> bool:
        """The head and all below it are private."""
        return name == self.head or name.startswith(f"{self.head}.")
