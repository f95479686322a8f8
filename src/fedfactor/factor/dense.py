"""The trivial scheme, and weight normalisation of any scheme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfactor.factor.base import Factors, Scheme, WeightShape, normal


@dataclass(frozen=True)
class Dense(Scheme):
    """The weight itself, as the only factor `w`."""

    name: ClassVar[str] = "dense"

    def shapes(self, shape: WeightShape) -> dict[str, tuple[int, ...]]:
        """Return the size of the weight."""
        return {"w": shape.size}

    def init(
        self, shape: WeightShape, generator: torch.Generator | None = None, *, std: float | None = None
    ) -> Factors:
        """Return a Gaussian weight."""
        return {"w": normal(shape.size, shape.he_std if std is None else std, generator)}

    def compose(self, factors: Factors, shape: WeightShape) -> Tensor:
        """Return the weight."""
        return factors["w"]

    def from_dense(self, weight: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return the weight as its own factor."""
        return {"w": weight.clone()}

    def zero(self, base: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return a weight of zeros."""
        return {"w": torch.zeros_like(base)}

    def compose_macs(self, shape: WeightShape) -> int:
        """Return 0: there is nothing to compose."""
        return 0


@dataclass(frozen=True)
class WeightNorm(Scheme):
    """Weight normalisation (Salimans & Kingma 2016) of another scheme's weight: row o is g_o v_o / ||v_o||.

    FedPara applies it to all variants of its LSTM (appendix C.2). Factors: those of the inner scheme, and `g` (out,).
    """

    inner: Scheme = Dense()
    name: ClassVar[str] = "weight_norm"

    def shapes(self, shape: WeightShape) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the inner factors and of the row lengths."""
        return {**self.inner.shapes(shape), "g": (shape.out,)}

    def init(
        self, shape: WeightShape, generator: torch.Generator | None = None, *, std: float | None = None
    ) -> Factors:
        """Return inner factors and their row lengths, so that the composed weight starts as the inner one."""
        inner = self.inner.init(shape, generator, std=std)
        return self._with_lengths(inner, self.inner.compose(inner, shape))

    def compose(self, factors: Factors, shape: WeightShape) -> Tensor:
        """Scale each row of the inner weight to its length."""
        v = self.inner.compose(factors, shape)
        return v * (factors["g"] / _row_norms(v)).view(-1, *[1] * (v.dim() - 1))

    def from_dense(self, weight: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Factorise the weight with the inner scheme and keep its row lengths."""
        return self._with_lengths(self.inner.from_dense(weight, generator), weight)

    def compose_macs(self, shape: WeightShape) -> int:
        """Count the products of the inner scheme."""
        return self.inner.compose_macs(shape)

    @staticmethod
    def _with_lengths(inner: Factors, weight: Tensor) -> Factors:
        return {**inner, "g": _row_norms(weight.detach())}


def _row_norms(weight: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(weight.flatten(1), dim=1)
    return norms
