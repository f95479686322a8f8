"""Splits of a weight into two factors along its singular vectors: that of FedHM, and that of PriSM and Pufferfish.

Both write an unrolled weight as U V^T and run as two layers in sequence, without a norm or activation between them.
They differ in the unrolling: FedHM gives each factor one axis of the kernel, PriSM gives the whole kernel to the first.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from fedfactor.factor.base import (
    ConvGeometry,
    Factors,
    Scheme,
    Unfit,
    WeightShape,
    check_range,
    convolve,
    normal,
    spread,
)
from fedfactor.factor.svd import truncated_svd


@dataclass(frozen=True)
class SpectralSplit(Scheme):
    """What both splits have in common: factors `v` (r, inp, ...), applied first, and `u` (out, r, ...).

    `ratio` in (0, 1] sets the rank by the rule of the sub-class; `rank`, if given, sets it directly.
    """

    ratio: float = 0.5
    rank: int | None = None
    sequential: ClassVar[bool] = True

    @abstractmethod
    def _kernels(self, shape: WeightShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the kernels of `v` and of `u`."""

    @abstractmethod
    def _rank_by_ratio(self, shape: WeightShape) -> int:
        """Return the rank that `ratio` stands for; it may exceed the largest possible one."""

    @abstractmethod
    def _unroll(self, weight: Tensor) -> Tensor:
        """Reshape the weight to the matrix that is factorised."""

    @abstractmethod
    def _roll(self, matrix: Tensor, shape: WeightShape) -> Tensor:
        """Undo `_unroll`."""

    @abstractmethod
    def _geometries(self, geometry: ConvGeometry) -> tuple[ConvGeometry, ConvGeometry]:
        """Return how the two convolutions share stride, padding and dilation of the original one."""

    def rank_of(self, shape: WeightShape) -> int:
        """Return the rank for a weight of this shape. Raise ValueError if `ratio` or `rank` is out of range."""
        first, second = self._kernels(shape)
        largest = min(shape.inp * math.prod(first), shape.out * math.prod(second))
        if self.rank is not None:
            check_range("rank", self.rank, 1, largest, whole=True)
            return self.rank
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must lie in (0, 1], got {self.ratio:g}")
        return min(max(self._rank_by_ratio(shape), 1), largest)

    def shapes(self, shape: WeightShape) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the factors as convolution kernels."""
        r = self.rank_of(shape)
        first, second = self._kernels(shape)
        return {"u": (shape.out, r, *second), "v": (r, shape.inp, *first)}

    def init(
        self, shape: WeightShape, generator: torch.Generator | None = None, *, std: float | None = None
    ) -> Factors:
        """Return both factors with the same standard deviation s: an entry of the product has variance r s^4."""
        deviation = math.sqrt((shape.he_std if std is None else std) / math.sqrt(self.rank_of(shape)))
        return {name: normal(size, deviation, generator) for name, size in self.shapes(shape).items()}

    def compose(self, factors: Factors, shape: WeightShape) -> Tensor:
        """Multiply U V^T out and reshape it to the weight."""
        u, v = _as_matrices(factors["u"], factors["v"])
        return self._roll(u @ v, shape)

    def from_dense(self, weight: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return U sqrt(S) and sqrt(S) V^T of the leading singular triplets (`truncated_svd`)."""
        if not weight.any():  # of factors that are all 0, none would ever get a gradient
            return self.zero(weight, generator)
        sizes = self.shapes(WeightShape.of(weight))
        out, r, *second = sizes["u"]
        U, S, Vh = truncated_svd(self._unroll(weight), r)
        root = S.sqrt()
        u = (U * root).reshape(out, *second, r).movedim(-1, 1)
        v = (root[:, None] * Vh).reshape(sizes["v"])
        return {"u": u.contiguous(), "v": v.contiguous()}

    def zero(self, base: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return LoRA's start: U = 0, and V Gaussian."""
        sizes = self.shapes(WeightShape.of(base))
        return {"u": base.new_zeros(sizes["u"]), "v": spread(sizes["v"], generator, math.prod(sizes["v"][1:]))}

    def as_product(self, factors: Factors, shape: WeightShape) -> tuple[Tensor, Tensor]:
        """Return U and V, if V has the whole kernel."""
        if math.prod(self._kernels(shape)[1]) != 1:
            return super().as_product(factors, shape)
        return factors["u"].flatten(1), factors["v"].view(-1, *shape.size[1:])

    def forward(
        self,
        x: Tensor,
        factors: Factors,
        shape: WeightShape,
        geometry: ConvGeometry | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Apply `v`, then `u` with the bias; the weight is never composed."""
        u, v = factors["u"], factors["v"]
        if geometry is None:
            return linear(linear(x, v), u, bias)
        first, second = self._geometries(geometry)
        return convolve(convolve(x, v, None, first), u, bias, second)

    def compose_macs(self, shape: WeightShape) -> int:
        """Count the product of the two factors."""
        return self.rank_of(shape) * shape.numel

    def macs(self, shape: WeightShape, positions: int) -> int:
        """Count one multiply-accumulate per factor entry and position: the factors run one after another."""
        return self.parameters(shape) * positions


@dataclass(frozen=True)
class SpatialSplit(SpectralSplit):
    """FedHM: a (1, k) convolution to r channels, then a (k, 1) convolution; r k (inp + out) parameters.

    The weight (O, I, kh, kw) is unrolled to (O kh, I kw), and r = max(round(ratio O), 1), capped at the rank of that
    matrix. A linear weight (O, I) is split as it is, with r = max(round(ratio min(O, I)), 1). Factors: `v` (r, I, 1,
    kw), `u` (O, r, kh, 1). A kernel of one axis has no second axis to share and is `Unfit`.

    Deviations: the paper applies the k x 1 convolution first, the authors' code and this class second; the
    counts are the same.
    """

    name: ClassVar[str] = "spatial_split"

    def _kernels(self, shape: WeightShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if len(shape.kernel) not in (0, 2):
            raise Unfit(f"{self.name} shares the two axes of a kernel, but {shape} has one; use ChannelSplit")
        return ((1, shape.kernel[1]), (shape.kernel[0], 1)) if shape.kernel else ((), ())

    def _rank_by_ratio(self, shape: WeightShape) -> int:
        return round(self.ratio * (shape.out if shape.kernel else min(shape.out, shape.inp)))

    def _unroll(self, weight: Tensor) -> Tensor:
        if weight.dim() == 2:
            return weight
        return weight.transpose(1, 2).flatten(2).flatten(0, 1)

    def _roll(self, matrix: Tensor, shape: WeightShape) -> Tensor:
        if not shape.kernel:
            return matrix
        rows, columns = shape.kernel
        return matrix.reshape(shape.out, rows, shape.inp, columns).transpose(1, 2).contiguous()

    def _geometries(self, geometry: ConvGeometry) -> tuple[ConvGeometry, ConvGeometry]:
        (s0, s1), (p0, p1), (d0, d1) = geometry.stride, geometry.padding, geometry.dilation
        return ConvGeometry((1, s1), (0, p1), (1, d1)), ConvGeometry((s0, 1), (p0, 0), (d0, 1))


@dataclass(frozen=True)
class ChannelSplit(SpectralSplit):
    """PriSM, Pufferfish: a k x k convolution to r channels, then a 1 x 1 convolution; r (inp k^2 + out) parameters.

    The weight (N, M, *kernel) is unrolled to (N, M k^2), and r = ceil(ratio min(N, M k^2)) as in PriSM;
    Pufferfish is `ChannelSplit(0.25, rounding="floor")`, LoRA is `ChannelSplit(rank=8)` with B = `u` and A = `v`.
    Factors: `v` (r, M, *kernel), which carries stride, padding and dilation, and `u` (N, r, 1, ...). Kernels of one
    axis work too.
    """

    rounding: str = "ceil"
    full_rank: int | None = None
    """The r of alpha / r for the change of a frozen base, if clients have different ranks; by default their own."""
    name: ClassVar[str] = "channel_split"

    def rank_of(self, shape: WeightShape) -> int:
        """Return the rank. Raise ValueError if it, or the full rank, is out of range."""
        if self.full_rank is not None:
            check_range("rank", self.full_rank, 1, min(shape.out, shape.fan_in), whole=True)
        return super().rank_of(shape)

    def alpha_rank(self, shape: WeightShape) -> int | None:
        """Return the rank, or that of clients with full capacity."""
        return self.full_rank or self.rank_of(shape)

    def _kernels(self, shape: WeightShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return shape.kernel, (1,) * len(shape.kernel)

    def _rank_by_ratio(self, shape: WeightShape) -> int:
        # Nine decimals: 0.1 * 30 is slightly more than 3 in floating point, but its ceiling must be 3.
        wanted = round(self.ratio * min(shape.out, shape.fan_in), 9)
        if self.rounding == "ceil":
            return math.ceil(wanted)
        if self.rounding == "floor":
            return math.floor(wanted)
        if self.rounding == "round":
            return round(wanted)
        raise ValueError(f"rounding must be 'ceil', 'floor' or 'round', got {self.rounding!r}")

    def _unroll(self, weight: Tensor) -> Tensor:
        return weight.flatten(1)

    def _roll(self, matrix: Tensor, shape: WeightShape) -> Tensor:
        return matrix.reshape(shape.size)

    def _geometries(self, geometry: ConvGeometry) -> tuple[ConvGeometry, ConvGeometry]:
        return geometry, ConvGeometry.plain(len(geometry.stride))


def frobenius_decay(u: Tensor, v: Tensor) -> Tensor:
    """Return the scalar (1/2) ||U V^T||_F^2 for the factors of either split; differentiable.

    It is (1/2) tr((U^T U)(V^T V)): two r x r Gram matrices instead of the composed weight. Its gradient is
    U (V^T V) and V (U^T U): the Frobenius decay (Khodak et al. 2021), which replaces weight decay.
    """
    U, Vt = _as_matrices(u, v)
    return 0.5 * ((U.T @ U) * (Vt @ Vt.T)).sum()


def spectrum(factors: Factors) -> Tensor:
    """Return the singular values (r,), in descending order, of the weight that `from_dense` split into these factors.

    They are ||u_i|| ||v_i||. For factors that were trained afterwards these are the strengths of the r components.
    """
    U, Vt = _as_matrices(factors["u"], factors["v"])
    strengths: Tensor = torch.linalg.vector_norm(U, dim=0) * torch.linalg.vector_norm(Vt, dim=1)
    return strengths


def effective_rank(sigma: Tensor, *, code: bool = False) -> float:
    """Return the effective number of components: exp of the entropy of p_i = sigma_i / sum sigma (PriSM 4.3).

    The paper prints the entropy inside a logarithm, without its sign. With `code`, return 1 / sum p_i^2, which the
    authors' code computes.
    """
    p = sigma.double() / sigma.double().sum()
    return 1 / float(p.square().sum()) if code else math.exp(-float(torch.special.xlogy(p, p).sum()))


def _as_matrices(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten the factors to U (rows, r) and V^T (r, columns) of the unrolled weight."""
    return u.movedim(1, -1).reshape(-1, u.shape[1]), v.flatten(1)
