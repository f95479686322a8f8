"""What hooks may look at while one client trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.settings import Training
from fedfactor.task import Task


@dataclass
class Context:
    """What hooks may look at while one client trains."""

    task: Task
    training: Training
    round: int
    client: int
    capacity: float
    lr: float
    targets: Tensor
    """Of all the client's examples."""
    kept: Tensors
    """What the client kept of its last round; empty when it takes part for the first time."""
    down: Tensors
    """The download as decoded: the anchor of proximal terms."""
    extras: Tensors
    """What the optimizer sent along, by the name of the tensor it belongs to."""
    state: Tensors
    """What the optimizer kept on this client."""
    travel: dict[str, float] = field(default_factory=dict)
    """How far a constant gradient of one has moved each parameter: steps times rate; momentum adds to it."""

    @property
    def labels(self) -> Tensor:
        """The classes that occur in the client's data."""
        return self._classes[0]

    @property
    def counts(self) -> Tensor:
        """How many examples of each of them there are."""
        return self._classes[1]

    @cached_property
    def _classes(self) -> tuple[Tensor, Tensor]:
        if self.task.kind != "classification":
            return self.targets[:0], self.targets[:0]
        labels, counts = torch.unique(self.targets, return_counts=True)
        return labels, counts

    @staticmethod
    def gradients(loss: Tensor, of: Mapping[str, Tensor]) -> Tensors:
        """Differentiate a loss with respect to intermediate tensors, keeping the graph for the step itself."""
        found = torch.autograd.grad(loss, list(of.values()), retain_graph=True, allow_unused=True)
        return {name: gradient for name, gradient in zip(of, found, strict=True) if gradient is not None}
