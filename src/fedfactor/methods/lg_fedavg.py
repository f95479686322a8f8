"""LG-FedAvg: personal first layers, shared last layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from fedfactor.methods.fedavg import FedAvg
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.method import Traits
from fedfactor.registry import described, register
from fedfactor.task import Build


@register("methods", "lg_fedavg", paper="arXiv:2001.01523")
@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """The last layers are shared and averaged with equal weights; the first stay private. Both are trained together.

    Follows the authors' code for MNIST. Their code for CIFAR does the opposite and shares the two convolutions:
    `shared = ["conv1", "conv2"]`.

    Deviations: the authors start from a model trained with FedAvg. To do the same, start from such a model.

    Use it where inputs differ between clients (sensors, languages), the decisions are common and the last layers are
    small: only they are uploaded and downloaded.
    """

    shared: tuple[str, ...] = field(default=("fc",), metadata=described("name prefixes of the shared layers"))

    @property
    def traits(self) -> Traits:
        """All clients have equal weight in the mean."""
        return Traits(weighting="uniform")

    def private_names(self, network: nn.Module) -> set[str]:
        """Return the names of all tensors outside the shared layers."""
        below = tuple(f"{layer}." for layer in self.shared)
        return {name for name in tensors_of(network) if not name.startswith(below)}

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model. Raise ValueError if it lacks a shared layer, or if nothing is private."""
        model = build(1.0)
        names = [name for name, _ in model.named_modules() if name]
        for layer in self.shared:
            if layer not in names:
                raise ValueError(f"the model has no layer {layer!r} to share; its layers are {', '.join(names[:20])}")
        if not self.private_names(model):
            raise ValueError("lg_fedavg shares every layer of this model: that is fedavg; leave some out of `shared`")
        return model
