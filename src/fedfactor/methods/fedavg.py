"""FedAvg."""

from __future__ import annotations

from dataclasses import dataclass

from fedfactor.protocol.method import Method
from fedfactor.registry import register


@register("methods", "fedavg", paper="arXiv:1602.05629")
@dataclass(frozen=True)
class FedAvg(Method):
    """One dense model, shared by all clients and averaged with weights proportional to their examples (Alg. 1).

    Use it as the baseline for the bytes and the accuracy of all other methods.
    """
