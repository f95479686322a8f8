"""HeteroFL: narrower networks for weaker clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from fedfactor.methods.base import Method, Participant
from fedfactor.nn.norms import axis_blocks, scaled_norm_inputs, without_statistics
from fedfactor.nn.state import tensors_of
from fedfactor.plan import Plan, Tensors, slice_plan
from fedfactor.registry import described, register

if TYPE_CHECKING:
    from fedfactor.client import Context
    from fedfactor.task import Task


@register("methods", "heterofl", paper="arXiv:2010.01264")
@dataclass(frozen=True)
class HeteroFL(Method):
    """A client of capacity p trains the first p of every channel axis; each element is averaged over its holders.

    Deviations from the authors' code: clients count the same whatever their data (as there), but rows of the classifier
    are averaged over all clients, not only over those that have the label. Norm statistics: see `static_norm`.
    """

    scaler: bool = field(default=True, metadata=described("divide what enters a norm by p while training"))
    masked_loss: bool = field(default=False, metadata=described("leave classes a client does not have out of its loss"))
    static_norm: bool = field(
        default=False, metadata=described("batch norms keep no statistics; they are estimated after training")
    )
    weighting: ClassVar[str] = "uniform"
    adapts: ClassVar[bool] = True

    @property
    def calibrates(self) -> bool:
        """Whether norm statistics are gathered from the clients before a model is used."""
        return self.static_norm

    def check(self, task: Task, network: nn.Module) -> None:
        """A masked loss needs classes."""
        task.check_masked(self.masked_loss)

    def network(self, build: Callable[[float], nn.Module], capacity: float) -> nn.Module:
        """Build the task's model at this width."""
        network = build(capacity)
        return without_statistics(network) if self.static_norm else network

    def plan(self, view: Tensors, who: Participant, network: nn.Module, rng: torch.Generator | None) -> Plan:
        """Take the leading part of every axis; within each gate, or each of q, k and v, where they are fused."""
        return slice_plan(view, tensors_of(network), axis_blocks(network))

    def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Return the loss with Scaler and mask."""
        x, y = batch
        if self.scaler and ctx.capacity < 1:
            with scaled_norm_inputs(network, 1 / ctx.capacity):
                outputs = network(x)
        else:
            outputs = network(x)
        return ctx.task.loss(outputs, y, only=ctx.labels if self.masked_loss else None)
