"""Base class of methods that train the task's model with factorised layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from fedfactor.factor import Dense
from fedfactor.factor.base import Scheme
from fedfactor.nn import check, factor_weights, factorize
from fedfactor.nn.frozen import is_tuned
from fedfactor.protocol.method import Method
from fedfactor.registry import described
from fedfactor.support.checks import check_choice
from fedfactor.task import Build


def with_factors(network: nn.Module, scheme: Scheme, message: str, skip: Sequence[str] = ()) -> nn.Module:
    """Return the network. Raise ValueError, beginning with `message`, if none of its layers is factorised."""
    layers = factor_weights(network).values()
    if all(layer.base is not None and isinstance(layer.scheme, Dense) for layer in layers):
        if is_tuned(network) and not layers:
            raise ValueError(f"{message}: tune.targets gives none a change; fedavg trains what tune.train lists")
        reasons = "; ".join(str(finding) for finding in check(network, scheme, skip=skip)[:3])
        raise ValueError(f"{message}: {reasons or 'all layers are kept dense'}")
    return network


def factorised(
    method: Method, model: nn.Module, scheme: Scheme, skip: Sequence[str], *, keep_weights: bool
) -> nn.Module:
    """Factorise a model. Raise ValueError if no layer can be: the method would silently be FedAvg."""
    network = factorize(model, scheme, skip=skip, keep_weights=keep_weights)
    return with_factors(network, scheme, f"{method.name} finds no layer to factorise in this model")


@dataclass(frozen=True)
class Factorised(Method):
    """A method that factorises the layers of the task's model and averages the factors."""

    dense: tuple[str, ...] = field(default=(), metadata=described("patterns of layers that stay dense"))
    start: Literal["random", "given"] = field(
        default="random",
        metadata=described("first factors: drawn at random, or fitted to the weights of the given model"),
    )

    def __post_init__(self) -> None:
        check_choice("start", self.start, ("random", "given"))

    def scheme(self) -> Scheme:
        """Return the scheme that factorises a layer."""
        raise NotImplementedError

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Factorise the task's model."""
        return factorised(self, build(1.0), self.scheme(), self.dense, keep_weights=self.start == "given")
