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
    """Batch norms (scale, shift, statistics) stay on the client; all other tensors are averaged with equal weights.

    Follows the authors' code, except that batch norms are found by their type. The code looks for "bn" in their names,
    which misses batch norms inside a `Sequential`.

    Use it where clients have the same classes but different inputs (cameras, scanners, styles) and the model has batch
    norms. New clients start with the batch norms of the initial model.
    """

    @property
    def traits(self) -> Traits:
        """All clients have equal weight in the mean."""
        return Traits(weighting="uniform")

    def private_names(self, network: nn.Module) -> set[str]:
        """Return the names of all tensors of batch norms."""
        inside = tuple(f"{name}." for name in batch_norms(network))
        return {name for name in tensors_of(network) if name.startswith(inside)} if inside else set()

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model. Raise ValueError if it has no batch norm: the method would silently be FedAvg."""
        model = build(1.0)
        if not batch_norms(model):
            raise ValueError(
                "fedbn keeps batch norms private, but the model has none; use a model with batch norms, or fedavg"
            )
        return model
