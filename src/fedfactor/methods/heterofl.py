"""HeteroFL: narrower networks for weaker clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor, nn

from fedfactor.methods.sliced import Sliced
from fedfactor.nn.norms import batch_norms, scaled_norm_inputs, without_statistics
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Traits
from fedfactor.registry import described, register
from fedfactor.task import Build, Task


@register("methods", "heterofl", paper="arXiv:2010.01264")
@dataclass(frozen=True)
class HeteroFL(Sliced):
    """A client of capacity p trains the first p of every channel axis; each element is averaged over its holders.

    Definition not re-read in the paper; it follows the authors' code. Static batch norm: nothing is tracked while
    training, and the statistics of a width are estimated on all clients' data when its network is used. The Scaler acts
    in training only, so tracked statistics would be those of other numbers than a narrow network has in use: that pair
    is refused. The masked loss sets the logits of classes that a client does not have to 0.

    Deviations: clients count the same whatever their data (as there), but rows of the classifier are averaged over all
    clients, not only over those that have the label.

    Use it where devices differ and something robust is wanted: one dense model on the server, slices of it on
    devices, no SVD, the baseline of this family.
    """

    scaler: bool = field(default=True, metadata=described("divide what enters a norm by p while training"))
    masked_loss: bool = field(default=False, metadata=described("leave classes a client does not have out of its loss"))
    static_norm: bool = field(
        default=True, metadata=described("batch norms keep no statistics; they are estimated after training")
    )

    @property
    def traits(self) -> Traits:
        """What others need to know about this method."""
        return Traits(adapts=True, weighting="uniform", calibrates=self.static_norm)

    def bind(self, task: Task, levels: Sequence[float]) -> Self:
        """A masked loss needs classes."""
        task.check_masked(self.masked_loss)
        return self

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Build the task's model at this width."""
        network = super().network(build, capacity)
        if self.static_norm:
            return without_statistics(network)
        tracked = [name for name, norm in batch_norms(network).items() if norm.track_running_stats]
        if self.scaler and tracked:
            raise ValueError(
                f"heterofl's Scaler changes what {tracked[0]!r} gets in training but not in use, so the statistics it "
                "keeps would be wrong; set static_norm = true, or scaler = false"
            )
        return network

    def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Return the loss with Scaler and mask."""
        x, y = batch
        if self.scaler and ctx.capacity < 1:
            with scaled_norm_inputs(network, 1 / ctx.capacity):
                outputs = network(x)
        else:
            outputs = network(x)
        return ctx.task.loss(outputs, y, only=ctx.labels if self.masked_loss else None)
