"""HeteroFL: narrower networks for clients of less capacity."""

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
    """A client of capacity p trains the first share p of each channel axis; elements are averaged over their holders.

    Static batch norm tracks no statistics during training. When a network is used, the statistics of its width are
    estimated on all clients' data. The Scaler acts in training only, so tracked statistics would not fit a narrow
    network in use: this combination is refused. The masked loss sets the logits of classes that a client does not have
    to 0.

    Follows the authors' code, where all clients have equal weight in the mean.

    Deviations: rows of the classifier are averaged over all clients, not only over those that have the label.

    Use it where devices differ and you want a robust baseline: one dense model on the server, slices of it on the
    devices, no SVD.
    """

    scaler: bool = field(default=True, metadata=described("divide the inputs of norms by p during training"))
    masked_loss: bool = field(
        default=False, metadata=described("exclude classes that a client does not have from its loss")
    )
    static_norm: bool = field(
        default=True, metadata=described("batch norms track no statistics; they are estimated after training")
    )

    @property
    def traits(self) -> Traits:
        """Clients of less capacity get a narrower network, and all have equal weight in the mean."""
        return Traits(adapts=True, weighting="uniform", calibrates=self.static_norm)

    def bind(self, task: Task, levels: Sequence[float]) -> Self:
        """Raise ValueError if the loss is masked and the task has no classes."""
        task.check_masked(self.masked_loss)
        return self

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model at this width. Raise ValueError if the Scaler is used with tracked statistics."""
        network = super().network(build, capacity)
        if self.static_norm:
            return without_statistics(network)
        tracked = [name for name, norm in batch_norms(network).items() if norm.track_running_stats]
        if self.scaler and tracked:
            raise ValueError(
                f"heterofl's Scaler changes the inputs of {tracked[0]!r} in training but not in use, so its running "
                "statistics would be wrong; set static_norm = true, or scaler = false"
            )
        return network

    def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Return the loss, with Scaler and mask if set."""
        x, y = batch
        if self.scaler and ctx.capacity < 1:
            with scaled_norm_inputs(network, 1 / ctx.capacity):
                outputs = network(x)
        else:
            outputs = network(x)
        return ctx.task.loss(outputs, y, only=ctx.labels if self.masked_loss else None)
