"""FedEx-LoRA: the error of averaging the factors separately is added to the base."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from fedfactor.factor.products import WeightedProducts
from fedfactor.methods.flexlora import averages_only
from fedfactor.methods.lora import Lora, factor_scales, with_bases
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.method import Fold, MovingFold, Networks, Traits
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.plan import Held, HoldersMean, Reply, Tensors
from fedfactor.protocol.settings import Training
from fedfactor.registry import register
from fedfactor.task import Build


@register("methods", "fedex_lora", paper="arXiv:2410.09432")
@dataclass(frozen=True)
class FedExLora(Lora):
    """A and B are averaged as in LoRA, and the residual mean(B A) - mean(B) mean(A) is added to the frozen weights.

    So the server's change is exactly the mean of the clients' changes. Clients get the residuals of the rounds that
    they have missed with their next download: as factors, whose rank is r for each client of a round but one, or as
    the sum of all residuals where that is smaller.

    Deviations: the paper sends the residual to all clients in each round. It also has an approximation of a lower rank,
    which is not part of it here. Without `[tune]`, residuals are added to zeros.

    Use it like LoRA, where exact means matter; the download grows with the number of clients of a round.
    """

    @property
    def traits(self) -> Traits:
        """Rounds add to the frozen base."""
        return Traits(moves_base=True)

    def refuses(self, optimizer: Optimizer, codec: Codec, training: Training | None = None) -> str | None:
        """Refuse optimizers that do more than averaging."""
        return averages_only(self.name, optimizer) or super().refuses(optimizer, codec, training)

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the model, in which each factorised layer has a base."""
        return with_bases(super().network(build, capacity))

    def fold(self, server: Tensors, view: Tensors, networks: Networks) -> Fold:
        """Average all tensors, and collect the products of the factors' changes."""
        return ResidualMean(view, self.weight, factor_scales(networks(1.0)))


class ResidualMean(HoldersMean, MovingFold):
    """The mean of all tensors, and the error of the products of averaged factors.

    With B_k = B + b_k and A_k = A + a_k, it is mean(b_k a_k) - mean(b_k) mean(a_k): no large numbers cancel out.
    """

    def __init__(self, view: Tensors, weight: Callable[[Reply], float], scales: Mapping[str, float]) -> None:
        super().__init__(view, weight)
        self._products = {layer: (scale, WeightedProducts()) for layer, scale in scales.items()}
        self.moves = {}

    def add(self, reply: Reply) -> None:
        """Add a reply."""
        super().add(reply)
        for layer, (_, products) in self._products.items():
            products.add(self.share(reply), reply.change(f"{layer}u"), reply.change(f"{layer}v"))

    def result(self) -> tuple[Tensors, Held]:
        """Return the mean, and the number of clients that held each element."""
        mean, held = super().result()
        for layer, (scale, products) in self._products.items():
            b, a = (mean[name] - self.view[name] for name in (f"{layer}u", f"{layer}v"))
            move = {name: tensor * (1 if name == "v" else scale) for name, tensor in products.residual(b, a).items()}
            if all(tensor.any() for tensor in move.values()):
                self.moves |= {f"{layer}{name}": tensor for name, tensor in move.items()}
        return mean, held
