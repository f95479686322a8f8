"""The `low` baselines of FedPara: low-rank matrices, Tucker convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from fedfactor.factor import LowRank
from fedfactor.factor.base import Scheme
from fedfactor.methods.base import Method
from fedfactor.nn import factorize
from fedfactor.registry import described, register


@dataclass(frozen=True)
class Factorised(Method):
    """A method whose network is the task's model with its layers kept as factors, which are averaged as they are."""

    dense: tuple[str, ...] = field(default=(), metadata=described("patterns of layers that stay dense"))

    def scheme(self) -> Scheme:
        """Return the scheme of the layers."""
        raise NotImplementedError

    def network(self, build: Callable[[float], nn.Module], capacity: float) -> nn.Module:
        """Factorise the task's model."""
        return factorize(build(1.0), self.scheme(), skip=self.dense)


@register("methods", "low_rank", paper="arXiv:2108.06098")
@dataclass(frozen=True)
class LowRankMethod(Factorised):
    """Low-rank matrices and Tucker convolutions, trained from scratch (FedPara Sec. 3.1, after TKD)."""

    ratio: float = field(default=0.2, metadata=described("rank as a share of the channels"))

    def scheme(self) -> Scheme:
        """Return the low-rank scheme."""
        return LowRank(ratio=self.ratio)
