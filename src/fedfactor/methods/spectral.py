"""Base class of methods whose server is dense and whose clients train low-rank factors of its layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from fedfactor.factor import frobenius_decay
from fedfactor.factor.spectral import SpectralSplit
from fedfactor.nn import FactorWeight, compose, dense_names, factor_weights
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Method, Networks, ParameterGroup, Phase, Traits, parameter_names
from fedfactor.protocol.plan import Tensors
from fedfactor.registry import described
from fedfactor.task import Batch


@dataclass(frozen=True)
class Spectral(Method):
    """A method that factorises the server's dense weights anew in each round, with Frobenius decay on the factors."""

    frobenius: bool = field(default=True, metadata=described("use Frobenius decay instead of weight decay on factors"))

    @property
    def traits(self) -> Traits:
        """The basis changes each round, and clients of less capacity get a smaller network."""
        return Traits(space="turning", adapts=True)

    def initial(self, networks: Networks) -> Tensors:
        """Return the dense weights of the full network, or with a frozen base their dense changes."""
        return {name: tensor.clone() for name, tensor in tensors_of(compose(networks(1.0), keep_base=True)).items()}

    def weight_names(self, networks: Networks, server: Tensors) -> set[str]:
        """Return the dense names of the full network's parameters."""
        network = networks(1.0)
        dense = {f"{layer}.{factor}": name for layer, name in dense_names(network).items() for factor in ("u", "v")}
        return {dense.get(name, name) for name, p in network.named_parameters() if p.requires_grad}

    def objective(self, network: nn.Module, batch: Batch, ctx: Context) -> Tensor:
        """Add the Frobenius decay to the loss."""
        return self.decayed(super().objective(network, batch, ctx), network, ctx)

    def decayed(self, loss: Tensor, network: nn.Module, ctx: Context) -> Tensor:
        """Add (lambda / 2) ||U V^T||^2 of each factorised layer to a loss, where lambda is the weight decay."""
        if self.frobenius and ctx.training.weight_decay:
            for layer in split_weights(network).values():
                loss = loss + ctx.training.weight_decay * frobenius_decay(layer.factors["u"], layer.factors["v"])
        return loss

    def phases(self, network: nn.Module, epochs: float) -> list[Phase]:
        """Train all parameters together, factors without weight decay if they have Frobenius decay."""
        factors = {f"{layer}.{factor}" for layer in split_weights(network) for factor in ("u", "v")}
        rest = [name for name in parameter_names(network) if name not in factors]
        return [Phase(epochs, [ParameterGroup(rest), ParameterGroup(factors, weight_decay=not self.frobenius)])]


def split_weights(network: nn.Module) -> dict[str, FactorWeight]:
    """Return the weights that are stored as U V, by layer; the dense changes of a frozen base are left out."""
    return {name: layer for name, layer in factor_weights(network).items() if isinstance(layer.scheme, SpectralSplit)}


def split_names(network: nn.Module) -> dict[str, str]:
    """Return the name on the server of each weight that is stored as U V, by layer."""
    split = split_weights(network)
    return {layer: name for layer, name in dense_names(network).items() if layer in split}
