"""FedHM: the server's dense model goes out at each client's rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedfactor.factor import SpatialSplit, frobenius_decay
from fedfactor.methods.base import Method, Networks, Participant
from fedfactor.nn import FactorWeight, factor_weights, factorize, first_layers
from fedfactor.nn.state import tensors_of
from fedfactor.plan import Held, Plan, Reply, Tensors, holders_mean, slice_plan, whole_plan
from fedfactor.registry import described, register

if TYPE_CHECKING:
    from fedfactor.client import Context
    from fedfactor.task import Task


@register("methods", "fedhm", paper="arXiv:2111.14655")
@dataclass(frozen=True)
class FedHM(Method):
    """The server is dense; a client of capacity gamma < 1 gets each later layer as its truncated SVD of rank gamma O.

    Replies are composed and averaged with softmax(gamma / tau) weights (Eq. 1, without its 1/P: softmax sums to one).

    Deviations: the mean is taken of the composed changes and added to the server's weights, so that what truncation
    cut off stays on the server and a round without a step changes nothing. `literal` takes the mean of the composed
    weights themselves, as Eq. 1 reads, which erases it.
    """

    rho: int = field(default=1, metadata=described("first layers that stay full"))
    dense: tuple[str, ...] = field(default=(), metadata=described("patterns of further layers that stay full"))
    tau: float = field(default=math.inf, metadata=described("softmax temperature; infinity: all count the same"))
    frobenius: bool = field(default=True, metadata=described("Frobenius decay takes weight decay's place on factors"))
    masked_loss: bool = field(default=False, metadata=described("leave classes a client does not have out of its loss"))
    literal: bool = field(default=False, metadata=described("average composed weights, not their changes"))
    space: ClassVar[Literal["slice", "turning", "personal"]] = "turning"
    weighting: ClassVar[str] = "softmax of capacity / tau"
    adapts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise ValueError(f"tau must be above 0, got {self.tau:g}")

    def check(self, task: Task, network: nn.Module) -> None:
        """A masked loss needs classes."""
        task.check_masked(self.masked_loss)

    def network(self, build: Callable[[float], nn.Module], capacity: float) -> nn.Module:
        """Dense at full capacity; else low rank but for the first layers, 1 x 1 convolutions and the classifier."""
        model = build(1.0)
        if capacity == 1.0:
            return model
        layers = first_layers(model, self.rho)
        points = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1)]
        classifier = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1:]
        return factorize(model, SpatialSplit(ratio=capacity), skip=[*layers, *points, *classifier, *self.dense])

    def prepare(self, server: Tensors, networks: Mapping[float, nn.Module]) -> Tensors:
        """Split every factorised layer once, at the highest rank that anybody takes."""
        highest: dict[str, FactorWeight] = {}
        for network in networks.values():
            for name, layer in factor_weights(network).items():
                if name not in highest or _rank(layer) > _rank(highest[name]):
                    highest[name] = layer
        view = dict(server)
        for name, layer in highest.items():
            factors = SpatialSplit(rank=_rank(layer)).from_dense(server[f"{name}.weight"])
            view.update({f"{name}.{factor}": tensor for factor, tensor in factors.items()})
        return view

    def plan(self, view: Tensors, who: Participant, network: nn.Module, rng: torch.Generator | None) -> Plan:
        """Take the leading components of each split layer, and the rest whole."""
        return slice_plan(view, tensors_of(network))

    def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Add (lambda / 2) ||U V^T||^2 of every factorised layer, lambda being the weight decay."""
        x, y = batch
        outputs = network(x)
        loss = ctx.task.loss(outputs, y, only=ctx.labels if self.masked_loss else None)
        if self.frobenius and ctx.training.weight_decay:
            for layer in factor_weights(network).values():
                loss = loss + ctx.training.weight_decay * frobenius_decay(layer.factors["u"], layer.factors["v"])
        return loss

    def decays(self, name: str, network: nn.Module) -> bool:
        """Factors have Frobenius decay instead of weight decay."""
        layer, _, factor = name.rpartition(".")
        return not (self.frobenius and factor in ("u", "v") and layer in factor_weights(network))

    def weights(self, replies: Sequence[Reply]) -> list[float]:
        """exp(gamma / tau), Eq. 1; the largest capacity is taken off, so that no small tau overflows."""
        largest = max(reply.capacity for reply in replies)
        return [math.exp((reply.capacity - largest) / self.tau) for reply in replies]

    def aggregate(
        self, server: Tensors, view: Tensors, replies: Sequence[Reply], networks: Networks
    ) -> tuple[Tensors, Held]:
        """Compose every reply to the server's shapes, then average."""
        composed = [self._dense(server, reply, factor_weights(networks(reply.capacity))) for reply in replies]
        return holders_mean(server, composed, self.weights(replies))

    def _dense(self, server: Tensors, reply: Reply, layers: Mapping[str, FactorWeight]) -> Reply:
        tensors, reference = _composed(reply.tensors, layers), _composed(reply.reference, layers)
        if self.literal:
            reference = {name: server[name] for name in tensors}
        return replace(reply, plan=whole_plan(tensors), tensors=tensors, reference=reference)


def _rank(layer: FactorWeight) -> int:
    return layer.factors["v"].shape[0]


def _composed(tensors: Tensors, layers: Mapping[str, FactorWeight]) -> Tensors:
    """Put the composed weight in place of each layer's factors."""
    dense = dict(tensors)
    for name, layer in layers.items():
        factors = {factor: dense.pop(f"{name}.{factor}") for factor in layer.factor_names}
        dense[f"{name}.weight"] = layer.scheme.compose(factors, layer.shape)
    return dense
