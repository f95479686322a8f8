"""pFedSD: clients distil their last personal model into the global one."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from fedfactor.methods.fedavg import FedAvg
from fedfactor.nn.state import answers_with, fill, tensors_of
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Diagnostics, Traits
from fedfactor.protocol.plan import Tensors
from fedfactor.registry import described, register


@register("methods", "pfedsd", paper="IEEE TPDS 34(2), 2023")
@dataclass(frozen=True)
class PFedSD(FedAvg, Diagnostics):
    """A client starts from the global model w and learns from its labels and from v_i, its model of its last round.

    Loss: CE(o_w, y) + lambda tau^2 KL(softmax(o_v / tau) || softmax(o_w / tau)), o being logits; at first CE alone.
    The trained model is sent, and is the new v_i: what the client uses, and the teacher of its next round. The server
    takes the plain mean.

    Definition not re-read in the paper: it follows the authors' code, whose defaults these are. Two faults of that code
    are not here: the teacher is in evaluation mode, and norm statistics are averaged with the weights.

    Use it where clients take part rarely and forget in between: each learns from its own last model. It needs a
    second forward pass and the memory of a second model.
    """

    strength: float = field(default=1.0, metadata=described("lambda"))
    temperature: float = field(default=1.0, metadata=described("tau"))

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature:g}")

    @property
    def traits(self) -> Traits:
        """What others need to know about this method."""
        return Traits(weighting="uniform")

    def load(self, network: nn.Module, down: Tensors, kept: Tensors, *, training: bool) -> None:
        """Train from the global model, but use the client's own last one; a client that never took part has none."""
        fill(network, down if training else kept or down)

    def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Add the teacher's part to the loss."""
        x, y = batch
        student = network(x)
        loss = ctx.task.loss(student, y)
        if not ctx.kept or not self.strength:
            return loss
        teacher = answers_with(network, ctx.kept, x)
        return loss + self.strength * ctx.task.divergence(student, teacher, self.temperature)

    def passes(self, capacity: float) -> dict[float, float]:
        """The teacher answers too; in a client's first round there is none, which is counted all the same."""
        return {capacity: 2.0 if self.strength else 1.0}

    def keep(self, network: nn.Module) -> Tensors:
        """The client keeps its whole model: v_i."""
        return tensors_of(network)
