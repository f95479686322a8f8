"""The context that a client's hooks get during training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedfactor.data.clients import Examples
from fedfactor.data.records import Records
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.settings import Training
from fedfactor.task import Task


@dataclass
class Context:
    """Data, settings and tensors that hooks may read while one client trains."""

    task: Task
    training: Training
    round: int
    client: int
    capacity: float
    lr: float
    """The learning rate of the current step."""
    examples: Examples
    """All the client's training examples."""
    kept: Tensors
    """Tensors that the client kept from its previous round; empty in its first round."""
    down: Tensors
    """The decoded download: the anchor of proximal terms."""
    extras: Tensors
    """Tensors that the optimizer sent with the model, by the name of the model's tensor they belong to."""
    state: Tensors
    """Tensors that the optimizer kept on this client."""
    moved: Tensors = field(default_factory=dict)
    """How far the base has moved, by layer."""
    travel: dict[str, float] = field(default_factory=dict)
    """How far a constant gradient of one would have moved each parameter: steps times learning rate, plus momentum.

    It is exact for SGD only: see `Optimizer.needs_sgd`."""

    @cached_property
    def targets(self) -> Tensor:
        """The targets of all the client's examples. Those of datasets are read for this."""
        return self.examples.targets() if isinstance(self.examples, Records) else self.examples[1]

    @property
    def labels(self) -> Tensor:
        """The classes in the client's data."""
        return self._classes[0]

    @property
    def counts(self) -> Tensor:
        """The number of the client's examples of each class in `labels`."""
        return self._classes[1]

    @cached_property
    def _classes(self) -> tuple[Tensor, Tensor]:
        if self.task.kind != "classification":
            return self.targets[:0], self.targets[:0]
        labels, counts = torch.unique(self.targets, return_counts=True)
        return labels[labels >= 0], counts[labels >= 0]  # targets below 0 are left out of the loss

    @staticmethod
    def gradients(loss: Tensor, of: Mapping[str, Tensor]) -> Tensors:
        """Return a loss's gradients with respect to intermediate tensors, and keep the graph for the training step."""
        found = torch.autograd.grad(loss, list(of.values()), retain_graph=True, allow_unused=True)
        return {name: gradient for name, gradient in zip(of, found, strict=True) if gradient is not None}
