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
    """Each client trains alone from the same initial model; nothing is shared.

    Use it to find out whether federated training helps: a personal method should be more accurate than this.
    """

    def private_names(self, network: nn.Module) -> set[str]:
        """Return all names: everything stays on the client."""
        return set(tensors_of(network))
