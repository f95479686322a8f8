"""pFedSD: clients distil their previous personal model into the global one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from fedfactor.methods.fedavg import FedAvg
from fedfactor.nn.state import answers_with, fill, tensors_of
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Diagnostics, Traits
from fedfactor.protocol.plan import Tensors
from fedfactor.registry import described, register
from fedfactor.task import Batch


@register("methods", "pfedsd", paper="IEEE TPDS 34(2), 2023")
@dataclass(frozen=True)
class PFedSD(FedAvg, Diagnostics):
    """A client starts from the global model w and learns from its labels and from v_i, the model it trained last.

    Loss: CE(o_w, y) + lambda tau^2 KL(softmax(o_v / tau) || softmax(o_w / tau)), where o are logits; CE only in a
    client's first round. The client uploads the trained model and keeps it as the new v_i: it uses v_i, and v_i is the
    teacher in its next round. The server takes the unweighted mean.

    Follows the authors' code, whose defaults these are. Two faults of the code are fixed: here the teacher is in
    evaluation mode, and norm statistics are averaged with the weights.

    Use it where clients take part rarely and forget in between: each learns from its own previous model. It needs a
    second forward pass and the memory of a second model.
    """

    strength: float = field(default=1.0, metadata=described("lambda"))
    temperature: float = field(default=1.0, metadata=described("tau"))

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature:g}")

    @property
    def traits(self) -> Traits:
        """All clients have equal weight in the mean."""
        return Traits(weighting="uniform", needs_logits="pfedsd's distillation" if self.strength else "")

    def load(self, network: nn.Module, down: Tensors, kept: Tensors, *, training: bool) -> None:
        """Load the global model for training, and the client's own model for use if it has one."""
        fill(network, down if training else kept or down)

    def objective(self, network: nn.Module, batch: Batch, ctx: Context) -> Tensor:
        """Add the divergence from the teacher to the loss."""
        student = ctx.task.outputs(network, batch)
        loss = ctx.task.loss(student, batch)
        if not ctx.kept or not self.strength:
            return loss
        teacher = ctx.task.outputs(partial(answers_with, network, ctx.kept), batch)
        return loss + self.strength * ctx.task.divergence(student, teacher, self.temperature)

    def passes(self, capacity: float) -> dict[float, float]:
        """Count the teacher's forward pass too, even in a client's first round, where there is no teacher."""
        return {capacity: 2.0 if self.strength else 1.0}

    def keep(self, network: nn.Module) -> Tensors:
        """Keep the whole model on the client as v_i."""
        return tensors_of(network)
