"""FedAvg."""

from __future__ import annotations

from dataclasses import dataclass

from fedfactor.protocol.method import Method
from fedfactor.registry import register


@register("methods", "fedavg", paper="arXiv:1602.05629")
@dataclass(frozen=True)
class FedAvg(Method):
    """One dense model, shared whole and averaged by the clients' number of examples (Alg. 1).

    Use it as the yardstick: bytes and accuracy of every other method are read against it.
    """
