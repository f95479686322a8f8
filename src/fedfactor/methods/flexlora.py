"""FlexLoRA: clients with different ranks, whose products are averaged and decomposed again."""

from __future__ import annotations

from dataclasses import dataclass

from fedfactor.methods.composing import DecomposedMean
from fedfactor.methods.lora import RankedLora, factor_names
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.method import Fold, Networks, Traits
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.settings import Training
from fedfactor.registry import register


def averages_only(name: str, optimizer: Optimizer) -> str | None:
    """Return why an optimizer cannot step on factors whose basis changes each round; plain averaging can."""
    if type(optimizer).step is Optimizer.step:
        return None
    return f"{optimizer.name} compares the server's factors with their mean, but {name} decomposes them anew each round"


@register("methods", "flexlora", paper="arXiv:2402.11505")
@dataclass(frozen=True)
class FlexLora(RankedLora):
    """A client of capacity p trains the leading p r singular components of the server's change.

    The server averages the clients' products B A and decomposes the mean: B = U S, A = V^T. The factors are stacked,
    reduced by QR, and only a small core is decomposed; the dense change is never computed. If the rank is that of the
    weight, the server's change is exactly the mean of the clients' changes.

    Deviations: the server adds the mean of the changes of the products to its own product, as `fedhm` does here. So the
    components that truncation removed for some clients stay on the server, and a round without training changes
    nothing. The paper averages the products themselves.

    Use it where devices differ and a weak client should get the most important components.
    """

    @property
    def traits(self) -> Traits:
        """The basis changes each round, and clients of less capacity get a lower rank."""
        return Traits(space="turning", adapts=True)

    def refuses(self, optimizer: Optimizer, codec: Codec, training: Training | None = None) -> str | None:
        """Refuse optimizers that do more than averaging."""
        return averages_only(self.name, optimizer) or super().refuses(optimizer, codec, training)

    def fold(self, server: Tensors, view: Tensors, networks: Networks) -> Fold:
        """Average the products of the factors, and all other tensors directly."""
        layers = [name.removesuffix("u") for name in factor_names(networks(1.0), "u")]
        return DecomposedMean(view, self.weight, [(f"{layer}u", f"{layer}v") for layer in layers])
