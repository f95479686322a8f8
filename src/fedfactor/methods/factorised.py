"""What methods have in common whose network is the task's model with its layers kept as factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from fedfactor.factor.base import Scheme
from fedfactor.nn import check, factor_weights, factorize
from fedfactor.protocol.method import Method
from fedfactor.registry import described
from fedfactor.task import Build


def with_factors(network: nn.Module, scheme: Scheme, otherwise: str, skip: Sequence[str] = ()) -> nn.Module:
    """Return the network. Raises ValueError, beginning with `otherwise`, if it has no layer made of factors."""
    if not factor_weights(network):
        reasons = "; ".join(str(finding) for finding in check(network, scheme, skip=skip)[:3])
        raise ValueError(f"{otherwise}: {reasons or 'all are kept dense'}")
    return network


@dataclass(frozen=True)
class Factorised(Method):
    """The task's model with its layers kept as factors, which are averaged as they are."""

    dense: tuple[str, ...] = field(default=(), metadata=described("patterns of layers that stay dense"))

    def scheme(self) -> Scheme:
        """Return the scheme of the layers."""
        raise NotImplementedError

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Factorise the task's model."""
        return self.factorised(build(1.0), self.dense)

    def factorised(self, model: nn.Module, skip: Sequence[str], *, keep_weights: bool = False) -> nn.Module:
        """Factorise a model. Raises ValueError if it has no layer to factorise: the method would silently be FedAvg."""
        network = factorize(model, self.scheme(), skip=skip, keep_weights=keep_weights)
        return with_factors(network, self.scheme(), f"{self.name} finds no layer to factorise in this model")
