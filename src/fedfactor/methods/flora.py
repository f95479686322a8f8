"""FLoRA: clients' adapters are stacked, merged into the base and drawn anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fedfactor.factor.base import spread
from fedfactor.factor.products import WeightedProducts
from fedfactor.methods.flexlora import averages_only
from fedfactor.methods.lora import RankedLora, factor_scales, with_bases
from fedfactor.nn.state import weights_sha256
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.method import Fold, MovingFold, Networks, Traits
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.plan import Held, HoldersMean, Reply, Tensors
from fedfactor.protocol.settings import Training
from fedfactor.registry import register
from fedfactor.rng import torch_rng
from fedfactor.task import Build


@register("methods", "flora", paper="arXiv:2409.05976")
@dataclass(frozen=True)
class FLoRA(RankedLora):
    """A client of capacity p trains p r components; all clients' B and A are stacked and added to the frozen weights.

    The stack [w_1 B_1, w_2 B_2, ...] [A_1; A_2; ...] is exactly the mean of the clients' changes, whatever their ranks.
    Each round starts with B = 0 and another random A. Clients get the stacks of the rounds that they have missed with
    their next download, or the sum of all stacks where that is smaller.

    Deviations: the server draws A for all clients and sends it with B; in the paper each client draws its own. Alpha
    is divided by the full rank on all clients. Without `[tune]`, stacks are added to zeros.

    Use it where devices differ and exact means matter; the download grows with the number of clients of a round.
    """

    @property
    def traits(self) -> Traits:
        """Rounds add to the frozen base, factors start anew in each, and clients of less capacity get a lower rank."""
        return Traits(space="turning", adapts=True, moves_base=True)

    def refuses(self, optimizer: Optimizer, codec: Codec, training: Training | None = None) -> str | None:
        """Refuse optimizers that do more than averaging."""
        return averages_only(self.name, optimizer) or super().refuses(optimizer, codec, training)

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the model, in which each factorised layer has a base."""
        return with_bases(super().network(build, capacity))

    def fold(self, server: Tensors, view: Tensors, networks: Networks) -> Fold:
        """Stack the factors, and average all other tensors."""
        return StackedMean(view, self.weight, factor_scales(networks(1.0)))


class StackedMean(HoldersMean, MovingFold):
    """The mean of all tensors but factors, which are stacked and then start anew."""

    def __init__(self, view: Tensors, weight: Callable[[Reply], float], scales: Mapping[str, float]) -> None:
        super().__init__(view, weight)
        self._products = {layer: (scale, WeightedProducts()) for layer, scale in scales.items()}
        self._factors = {f"{layer}{factor}" for layer in scales for factor in "uv"}
        self._changed: set[str] = set()
        self._count = 0
        self.moves = {}

    def add(self, reply: Reply) -> None:
        """Add a reply."""
        share = self.share(reply)
        self._count += 1
        self.add_tensors(reply, [name for name in reply.tensors if name not in self._factors], share)
        for layer, (_, products) in self._products.items():
            products.add(share, *(reply.tensors[f"{layer}{factor}"] for factor in "uv"))
            self._changed |= {layer for factor in "uv" if reply.change(f"{layer}{factor}").any()}

    def result(self) -> tuple[Tensors, Held]:
        """Return the mean, and the number of clients that held each element. Layers that nobody changed stay."""
        mean, held = super().result()
        for layer in [layer for layer in self._products if layer in self._changed]:
            u, v = (f"{layer}{factor}" for factor in "uv")
            scale, products = self._products[layer]
            for name, tensor in products.mean().items():
                self.moves[f"{layer}{name}"] = tensor if name == "v" else tensor * scale
            # The last A decides about the next one, so that a run that is resumed goes on with the same.
            rng = torch_rng(int(weights_sha256({v: self.view[v]})[:12], 16), "adapters")
            shape, fan_in = self.view[v].shape, self.view[v][0].numel()
            mean[u], mean[v] = torch.zeros_like(self.view[u]), spread(tuple(shape), rng, fan_in).to(self.view[v].dtype)
            held |= {u: self._count, v: self._count}
        return mean, held
