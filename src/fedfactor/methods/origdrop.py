"""OrigDrop: ordered dropout of the original kernels, PriSM's baseline."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from fedfactor.methods.sliced import Sliced
from fedfactor.nn.norms import without_statistics
from fedfactor.protocol.method import Traits
from fedfactor.registry import described, register
from fedfactor.task import Build


@register("methods", "origdrop", paper="arXiv:2208.13141")
@dataclass(frozen=True)
class OrigDrop(Sliced):
    """A client with keep ratio p trains the first share p of each layer's original kernels (Sec. 4).

    The sub-models and their mean are HeteroFL's, as the paper says: each client trains a smaller network, and each
    element is averaged over the clients that hold it, with equal weights. Elements that no client held do not change.
    Batch norms are those of the paper's other methods (Sec. 3.2.2): they always use the statistics of the batch. The
    networks of the clients' capacities are used and measured, not the server's full network, since possibly no client
    trained most of it.

    Deviations: the authors' code sets kernels that no client held to zero.

    Use it as PriSM's baseline, or as HeteroFL without Scaler, masked loss and tracked statistics.
    """

    static_norm: bool = field(
        default=False, metadata=described("estimate norm statistics after training; otherwise each batch uses its own")
    )

    @property
    def traits(self) -> Traits:
        """Clients of less capacity get a narrower network, and all have equal weight in the mean."""
        return Traits(adapts=True, weighting="uniform", calibrates=self.static_norm)

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model at this width, with batch norms that track no statistics."""
        return without_statistics(super().network(build, capacity))
