"""FedPara and pFedPara: Hadamard products of low-rank weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from fedfactor.factor import Hadamard, jacobian_correction
from fedfactor.factor.base import Scheme
from fedfactor.methods.factorised import Factorised
from fedfactor.nn import composed_once, factor_weights
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Traits
from fedfactor.registry import described, register
from fedfactor.task import Batch


@register("methods", "fedpara", paper="arXiv:2108.06098")
@dataclass(frozen=True)
class FedPara(Factorised):
    """W = (X1 Y1^T) * (X2 Y2^T) in each layer; all factors are shared and averaged (Alg. 1, Prop. 1 and 3).

    Use it where bandwidth is the bottleneck and each device can compute full-size layers. It needs a fraction of
    FedAvg's traffic and about as many multiply-accumulates. A larger `gamma` means more bytes and higher accuracy.

    With `start = "given"`, the factors are fitted to the model's weights (200 steps of L-BFGS per layer, see
    `fedfactor.factor.Hadamard.from_dense`), and the run's first event has the error of each layer.

    Fine-tuning (`[tune]`), the product is the change of a frozen weight: this is LoHa, with cores for convolutions.
    """

    gamma: float = field(
        default=0.1,
        metadata=described("r = (1 - gamma) r_min + gamma r_max, in [0, 1]", tries=(0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.0)),
    )
    tanh: bool = field(default=False, metadata=described("apply tanh to both inner weights (appendix B)"))
    jacobian: float = field(default=0.0, metadata=described("strength of the Jacobian correction (Eq. 9); 0: none"))
    rank: int = field(default=0, metadata=described("the inner rank itself, of all layers; 0: by `gamma`"))

    @property
    def traits(self) -> Traits:
        """The Jacobian correction is about the weights after a step of SGD."""
        return Traits(needs_sgd=self.jacobian > 0)

    def scheme(self) -> Scheme:
        """Return the Hadamard scheme."""
        return Hadamard(gamma=self.gamma, rank=self.rank or None, tanh=self.tanh)

    def objective(self, network: nn.Module, batch: Batch, ctx: Context) -> Tensor:
        """Add the Jacobian correction of each layer to the loss (Eq. 9)."""
        if not self.jacobian:
            return super().objective(network, batch, ctx)
        with composed_once(network) as composed:
            loss = super().objective(network, batch, ctx)
        gradients = ctx.gradients(loss, composed)
        layers = factor_weights(network)
        for name, gradient in gradients.items():
            layer = layers[name]
            penalty = jacobian_correction(
                layer.scheme, layer.factors, layer.shape, gradient, ctx.lr, self.jacobian, scale=layer.scale
            )
            loss = loss + penalty
        return loss


@register("methods", "pfedpara", paper="arXiv:2108.06098")
@dataclass(frozen=True)
class PFedPara(Factorised):
    """W = W1 * (W2 + 1): X1, Y1, T1, biases and norms are shared, X2, Y2, T2 stay on the client (Sec. 2.3, Alg. 2).

    Private factors start equal on all clients, because Algorithm 2 transmits them once at the start. With
    `start = "given"`, both halves are fitted to the model's weights. A client computes its half when it first takes
    part.

    Use it where clients differ and bandwidth matters too: half of the factors are uploaded and downloaded, the other
    half makes the model personal.
    """

    gamma: float = field(
        default=0.5,
        metadata=described("r = (1 - gamma) r_min + gamma r_max, in [0, 1]", tries=(0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.0)),
    )
    rank: int = field(default=0, metadata=described("the inner rank itself, of all layers; 0: by `gamma`"))

    def scheme(self) -> Scheme:
        """Return the personal Hadamard scheme."""
        return Hadamard(gamma=self.gamma, rank=self.rank or None, personal=True)

    def private_names(self, network: nn.Module) -> set[str]:
        """Return the names of the second inner factors of each layer."""
        layers = factor_weights(network)
        return {
            f"{layer}.{factor}" for layer in layers for factor in layers[layer].factor_names if factor.endswith("2")
        }
