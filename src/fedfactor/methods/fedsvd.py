"""FedSVD: clients train B, and the server turns A into the singular vectors of the change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fedfactor.factor.products import StackedProducts
from fedfactor.methods.flexlora import averages_only
from fedfactor.methods.lora import Lora, factor_names
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.method import Fold, Networks, Traits
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.plan import Held, HoldersMean, Reply, Tensors
from fedfactor.protocol.settings import Training
from fedfactor.registry import register
from fedfactor.task import Build


@register("methods", "fedsvd", paper="arXiv:2505.12805")
@dataclass(frozen=True)
class FedSVD(Lora):
    """Clients download B and A, and train and upload B; the server decomposes mean(B) A: B = U S, A = V^T.

    As in FFA-LoRA, A is the same on all clients of a round, so the mean is exact. The A of the next round has
    orthonormal rows that span the directions learned so far.

    Deviations: the paper adds differentially private noise to the uploads, which is not part of the method here.

    Use it like FFA-LoRA, where A should adapt: the upload is as small, the download is that of LoRA.
    """

    @property
    def traits(self) -> Traits:
        """The basis changes each round."""
        return Traits(space="turning")

    def refuses(self, optimizer: Optimizer, codec: Codec, training: Training | None = None) -> str | None:
        """Refuse optimizers that do more than averaging."""
        return averages_only(self.name, optimizer) or super().refuses(optimizer, codec, training)

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the model with a fixed A."""
        network = super().network(build, capacity)
        for name in factor_names(network, "v"):
            network.get_parameter(name).requires_grad_(False)
        return network

    def fold(self, server: Tensors, view: Tensors, networks: Networks) -> Fold:
        """Average B, and decompose its product with A where it has changed."""
        return TurnedMean(view, self.weight, factor_names(networks(1.0), "u"))


class TurnedMean(HoldersMean):
    """The mean of B, whose product with A is decomposed at the end."""

    def __init__(self, view: Tensors, weight: Callable[[Reply], float], factors: Iterable[str]) -> None:
        super().__init__(view, weight)
        self._factors = factors

    def result(self) -> tuple[Tensors, Held]:
        """Return the mean, and the number of clients that held each element."""
        mean, held = super().result()
        for u in self._factors:
            v = f"{u.removesuffix('u')}v"
            if not torch.equal(mean[u], self.view[u]):
                products = StackedProducts()
                products.add(mean[u], self.view[v])
                mean[u], mean[v] = products.decomposed(len(self.view[v]))
        return mean, held
