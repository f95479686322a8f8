"""Local training: the baseline without a federation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedfactor.nn.state import tensors_of
from fedfactor.protocol.method import Method
from fedfactor.registry import register


@register("methods", "local")
@dataclass(frozen=True)
class Local(Method):
    """Every client trains alone, from the same start; nothing is sent.

    Use it to learn whether federating is worth it: a personal method that is not ahead of it has earned nothing.
    """

    def private_names(self, network: nn.Module) -> set[str]:
        """Everything stays on the client."""
        return set(tensors_of(network))
