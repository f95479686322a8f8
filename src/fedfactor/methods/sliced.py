"""What methods have in common whose clients hold the leading part of every axis of the server's tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fedfactor.nn.norms import axis_blocks
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.method import Method, Participant, Traits
from fedfactor.protocol.plan import Plan, Tensors, slice_plan
from fedfactor.task import Build


@dataclass(frozen=True)
class Sliced(Method):
    """A client of capacity p trains the task's model at width p; each element is averaged over its holders."""

    @property
    def traits(self) -> Traits:
        """What others need to know about this method."""
        return Traits(adapts=True)

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Build the task's model at this width."""
        return build(capacity)

    def plan(self, view: Tensors, who: Participant, network: nn.Module, rng: torch.Generator | None) -> Plan:
        """Take the leading part of every axis; within each gate, or each of q, k and v, where they are fused."""
        return slice_plan(view, tensors_of(network), axis_blocks(network))
