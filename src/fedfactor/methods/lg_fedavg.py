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
    """The last layers are shared and averaged, all clients alike; the first stay private; both train together.

    Definition not re-read in the paper; its idea is local representations below shared layers. The authors' CIFAR code
    does the opposite and shares the two convolutions: `shared = ["conv1", "conv2"]`.

    Deviations: the authors start from a model that FedAvg has trained; give such a model to start from it here too.

    Use it where inputs differ between clients (sensors, languages) and decisions are common, and where the last
    layers are few: only they travel.
    """

    shared: tuple[str, ...] = field(default=("fc",), metadata=described("prefixes of the layers that are shared"))

    @property
    def traits(self) -> Traits:
        """What others need to know about this method."""
        return Traits(weighting="uniform")

    def private_names(self, network: nn.Module) -> set[str]:
        """What is below none of the shared layers."""
        below = tuple(f"{layer}." for layer in self.shared)
        return {name for name in tensors_of(network) if not name.startswith(below)}

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model; layers that are not there, and a split that leaves nothing private, are refused."""
        model = build(1.0)
        names = [name for name, _ in model.named_modules() if name]
        for layer in self.shared:
            if layer not in names:
                raise ValueError(f"the model has no layer {layer!r} to share; its layers are {', '.join(names[:20])}")
        if not self.private_names(model):
            raise ValueError("lg_fedavg shares every layer of this model: that is fedavg; leave some out of `shared`")
        return model
