"""HeteroFL: narrower networks for clients of less capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedfactor.methods.sliced import Sliced
from fedfactor.nn import outer_layers
from fedfactor.nn.norms import batch_norms, scaled_norm_inputs, without_statistics
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Fold, Networks, Traits
from fedfactor.protocol.plan import HoldersMean, Reply, Tensors
from fedfactor.registry import described, register
from fedfactor.task import Batch, Build


@register("methods", "heterofl", paper="arXiv:2010.01264")
@dataclass(frozen=True)
class HeteroFL(Sliced):
    """A client of capacity p trains the first share p of each channel axis; elements are averaged over their holders.

    Static batch norm tracks no statistics during training. When a network is used, the statistics of its width are
    estimated on all clients' data. The Scaler acts in training only, so tracked statistics would not fit a narrow
    network in use: this combination is refused. The masked loss sets the logits of classes that a client does not have
    to 0.

    Follows the authors' code, where all clients have equal weight in the mean.

    With `label_rows`, a row of the classifier is averaged over the clients that have its class, as in the authors'
    code; clients then tell the server which classes they have.

    Use it where devices differ and you want a robust baseline: one dense model on the server, slices of it on the
    devices, no SVD.
    """

    scaler: bool = field(default=True, metadata=described("divide the inputs of norms by p during training"))
    masked_loss: bool = field(
        default=False, metadata=described("exclude classes that a client does not have from its loss")
    )
    label_rows: bool = field(
        default=False, metadata=described("average a row of the classifier over the clients that have its class")
    )
    static_norm: bool = field(
        default=True, metadata=described("batch norms track no statistics; they are estimated after training")
    )

    @property
    def traits(self) -> Traits:
        """Clients of less capacity get a narrower network, and all have equal weight in the mean."""
        return Traits(
            adapts=True,
            weighting="uniform",
            calibrates=self.static_norm,
            sends_labels=self.label_rows,
            needs_classes="heterofl's label_rows"
            if self.label_rows
            else "heterofl's masked loss"
            if self.masked_loss
            else "",
        )

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

    def objective(self, network: nn.Module, batch: Batch, ctx: Context) -> Tensor:
        """Return the loss, with Scaler and mask if set."""
        if self.scaler and ctx.capacity < 1:
            with scaled_norm_inputs(network, 1 / ctx.capacity):
                outputs = ctx.task.outputs(network, batch)
        else:
            outputs = ctx.task.outputs(network, batch)
        return ctx.task.loss(outputs, batch, only=ctx.labels if self.masked_loss else None)

    def fold(self, server: Tensors, view: Tensors, networks: Networks) -> Fold:
        """Average each element over its holders; with `label_rows`, clients hold the rows of their classes."""
        if not self.label_rows:
            return super().fold(server, view, networks)
        classifier = outer_layers(networks(1.0))[-1]
        rows = (f"{classifier}.weight", f"{classifier}.bias")
        return HoldersMean(view, self.weight, lambda reply: _with_own_rows(reply, rows))


def _with_own_rows(reply: Reply, classifier: Sequence[str]) -> Reply:
    """Return a reply that holds, of the classifier's tensors, the rows of the client's classes."""
    rows, names = torch.tensor(reply.labels), [name for name in classifier if name in reply.tensors]
    plan = {name: replace(reply.plan[name], index=(rows, *reply.plan[name].index[1:])) for name in names}
    tensors, reference = ({n: some[n][rows] for n in names} for some in (reply.tensors, reply.reference))
    return replace(
        reply, plan=reply.plan | plan, tensors=reply.tensors | tensors, reference=reply.reference | reference
    )
