"""Base class of methods whose clients hold the leading part of each axis of the server's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedfactor.nn.norms import axis_blocks
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.method import Method, Participant, Traits
from fedfactor.protocol.plan import Plan, Tensors, slice_plan
from fedfactor.task import Build


@dataclass(frozen=True)
class Sliced(Method):
    """A method whose clients train the task's model at width p; elements are averaged over their holders."""

    untunable: ClassVar[str] = "its clients train slices of the weights, but a frozen base is whole"

    @property
    def traits(self) -> Traits:
        """Clients of less capacity get a narrower network."""
        return Traits(adapts=True)

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model at this width."""
        return build(capacity)

    def plan(self, view: Tensors, who: Participant, network: nn.Module, rng: torch.Generator | None) -> Plan:
        """Return the leading part of each axis; where gates, or q, k and v, are fused in a tensor, of each of them."""
        return slice_plan(view, tensors_of(network), axis_blocks(network))
