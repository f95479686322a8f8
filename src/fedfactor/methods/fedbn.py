"""FedBN: personal batch norms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedfactor.methods.fedavg import FedAvg
from fedfactor.nn.norms import batch_norms
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.method import Traits
from fedfactor.registry import register
from fedfactor.task import Build


@register("methods", "fedbn", paper="arXiv:2102.07623")
@dataclass(frozen=True)
class FedBN(FedAvg):
    """All tensors of batch norms (scale, shift, statistics) stay on the client; the rest is averaged, all alike.

    Definition not re-read in the paper: it follows the authors' code, but batch norms are found by their type, not by
    "bn" in their names, which misses those inside a `Sequential`.

    Use it where clients see the same classes through different eyes (other cameras, scanners, styles) and the model
    has batch norms. New clients have no norms of their own and start with the first model's.
    """

    @property
    def traits(self) -> Traits:
        """What others need to know about this method."""
        return Traits(weighting="uniform")

    def private_names(self, network: nn.Module) -> set[str]:
        """Everything that belongs to a batch norm."""
        inside = tuple(f"{name}." for name in batch_norms(network))
        return {name for name in tensors_of(network) if name.startswith(inside)} if inside else set()

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model; one without batch norms is refused, since the method would silently be FedAvg."""
        model = build(1.0)
        if not batch_norms(model):
            raise ValueError("fedbn keeps batch norms private, but the model has none")
        return model
