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
    """A client that keeps a share p of the model trains the first p of every layer's original kernels (Sec. 4).

    The sub-models and their mean are HeteroFL's procedure, as the paper says: really smaller networks, each element
    averaged over its holders, all counting the same, and elements that nobody held stay. Batch norms are those of the
    paper's other methods (Sec. 3.2.2): always the batch's own statistics. What is used and measured is the network that
    clients of a capacity hold, not the server's full one, most of which nobody may have trained.

    Deviations: the authors' code sets kernels that nobody held to zero.

    Use it as PriSM's baseline, or as HeteroFL without Scaler, masked loss and kept statistics.
    """

    static_norm: bool = field(
        default=False, metadata=described("estimate norm statistics after training; else each batch has its own")
    )

    @property
    def traits(self) -> Traits:
        """What others need to know about this method."""
        return Traits(adapts=True, weighting="uniform", calibrates=self.static_norm)

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Build the task's model at this width, its batch norms without statistics."""
        return without_statistics(super().network(build, capacity))
