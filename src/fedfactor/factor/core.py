"""A small core between two fixed bases, as in LoRA-XS and Fed-SB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedfactor.factor.base import ConvGeometry, Factors, Scheme, WeightShape, convolve
from fedfactor.factor.spectral import ChannelSplit
from fedfactor.factor.svd import truncated_svd


@dataclass(frozen=True)
class Core(Scheme):
    """W = B R A with fixed bases b (out, r) and a (r, inp, *kernel); only the core r (r, r) is trained.

    The bases are orthonormal. For the change of a frozen weight, they are its leading singular vectors.
    """

    rank: int = 8
    name: ClassVar[str] = "core"
    sequential: ClassVar[bool] = True
    frozen: ClassVar[tuple[str, ...]] = ("b", "a")

    def _split(self) -> ChannelSplit:
        return ChannelSplit(rank=self.rank)

    def shapes(self, shape: WeightShape) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the bases and of the core."""
        sizes = self._split().shapes(shape)
        return {"b": (shape.out, self.rank), "r": (self.rank, self.rank), "a": sizes["v"]}

    def init(
        self, shape: WeightShape, generator: torch.Generator | None = None, *, std: float | None = None
    ) -> Factors:
        """Return the factors of a random weight."""
        return self.from_dense(self._split().compose(self._split().init(shape, generator, std=std), shape))

    def compose(self, factors: Factors, shape: WeightShape) -> Tensor:
        """Multiply the factors out."""
        return (factors["b"] @ factors["r"] @ factors["a"].flatten(1)).view(shape.size)

    def from_dense(self, weight: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return the leading singular vectors as bases, and the singular values as the core."""
        b, values, a = self._basis(weight)
        return {"b": b, "r": values.diag(), "a": a}

    def zero(self, base: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return the leading singular vectors of the frozen weight, and a core of zeros."""
        b, values, a = self._basis(base)
        return {"b": b, "r": torch.zeros_like(values.diag()), "a": a}

    def _basis(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self.shapes(WeightShape.of(weight))
        u, s, vh = truncated_svd(weight.flatten(1), self.rank)
        # Singular vectors are determined up to their sign, which must be the same on all machines.
        signs = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()[0]
        return u * signs, s, (signs[:, None] * vh).view(sizes["a"])

    def alpha_rank(self, shape: WeightShape) -> int | None:
        """Return `None`: the authors do not scale the core."""
        return None

    def as_product(self, factors: Factors, shape: WeightShape) -> tuple[Tensor, Tensor]:
        """Return B R and A."""
        return factors["b"] @ factors["r"], factors["a"]

    def forward(
        self,
        x: Tensor,
        factors: Factors,
        shape: WeightShape,
        geometry: ConvGeometry | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Apply A, then R, then B with the bias; the weight is never composed."""
        b, r, a = factors["b"], factors["r"], factors["a"]
        if geometry is None:
            return F.linear(F.linear(F.linear(x, a), r), b, bias)
        point, axes = ConvGeometry.plain(len(shape.kernel)), (1,) * len(shape.kernel)
        x = convolve(convolve(x, a, None, geometry), r.view(*r.shape, *axes), None, point)
        return convolve(x, b.view(*b.shape, *axes), bias, point)

    def compose_macs(self, shape: WeightShape) -> int:
        """Count B R, and the product with A."""
        return shape.out * self.rank * self.rank + shape.numel * self.rank

    def macs(self, shape: WeightShape, positions: int) -> int:
        """Count one multiply-accumulate per parameter and position: the factors run one after another."""
        return self.parameters(shape) * positions
