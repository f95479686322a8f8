"""FLANC's neural composition: one basis for networks of all widths, and coefficients per width (Eq. 1, 2)."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedfactor.factor.base import (
    ConvGeometry,
    Factors,
    Scheme,
    Unfit,
    WeightShape,
    check_range,
    convolve,
    normal,
)
from fedfactor.factor.svd import truncated_svd

TRAFFIC = 50
"""Time to write and read one value between basis and mix, in multiply-accumulates (measured)."""
NARROW = 6
"""A convolution of R1 input channels takes 1 + NARROW / R1 times as long as its operations say (measured)."""


@dataclass(frozen=True)
class Composition(Scheme):
    """W = V U: inputs form S / R1 groups, and the kernels of each group are mixed from the same R2 basis kernels.

    Factors: the basis v (R2, R1, *kernel), the paper's V in R^(k^2 x R1 x R2), of the same size at each width, and the
    coefficients u (T, S / R1 * R2) of this width (S inputs, T outputs).
    """

    r1: int | None = None
    """Input channels of a basis kernel; divides the inputs of the layer at each width. Default: half of the inputs."""
    r2: int | None = None
    """Number of basis kernels. Default: a quarter of the outputs. Both defaults suit the narrowest network."""
    name: ClassVar[str] = "composition"

    def basis_of(self, shape: WeightShape) -> tuple[int, int]:
        """Return (R1, R2) for a weight of this shape."""
        if self.r1 is None and shape.inp % 2:
            raise Unfit(f"{shape.inp} inputs cannot be halved; set r1 to a divisor of them")
        r1 = shape.inp // 2 if self.r1 is None else self.r1
        r2 = max(1, shape.out // 4) if self.r2 is None else self.r2
        check_range("r1", r1, 1, shape.inp, whole=True)
        check_range("r2", r2, 1, float("inf"), whole=True)
        if shape.inp % r1:
            raise ValueError(f"r1 must divide the {shape.inp} inputs, got {r1}")
        return r1, r2

    def shapes(self, shape: WeightShape) -> dict[str, tuple[int, ...]]:
        """Return the sizes of the basis and of the coefficients."""
        r1, r2 = self.basis_of(shape)
        return {"v": (r2, r1, *shape.kernel), "u": (shape.out, shape.inp // r1 * r2)}

    def init(
        self, shape: WeightShape, generator: torch.Generator | None = None, *, std: float | None = None
    ) -> Factors:
        """Draw an orthogonal basis (Eq. 3 holds from the start) and Gaussian coefficients.

        Rows of V have unit norm over R1 k^2 entries, and an entry of W sums R2 products, so its variance is
        R2 var(u) / (R1 k^2).
        """
        r1, r2 = self.basis_of(shape)
        width = r1 * shape.area
        _warn_if_dependent(r2, width)
        square = torch.linalg.qr(normal((max(r2, width), min(r2, width)), 1.0, generator)).Q
        v = square if r2 > width else square.T
        v = F.normalize(v, dim=1)
        std = shape.he_std if std is None else std
        u = normal((shape.out, shape.inp // r1 * r2), std * (width / r2) ** 0.5, generator)
        return {"v": v.reshape(r2, r1, *shape.kernel).contiguous(), "u": u}

    def compose(self, factors: Factors, shape: WeightShape) -> Tensor:
        """Multiply the coefficients, one row per output and group, with the flattened basis."""
        v, u = factors["v"], factors["u"]
        return (u.reshape(-1, v.shape[0]) @ v.flatten(1)).reshape(shape.size)

    def from_dense(self, weight: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return the leading R2 right singular vectors of the kernels of all groups as basis; exact for full R2."""
        shape = WeightShape.of(weight)
        r1, r2 = self.basis_of(shape)
        _warn_if_dependent(r2, r1 * shape.area)
        rows = weight.reshape(-1, r1 * shape.area)
        rank = min(r2, *rows.shape)
        u, s, vh = truncated_svd(rows, rank)
        u, vh = F.pad(u * s, (0, r2 - rank)), F.pad(vh, (0, 0, 0, r2 - rank))
        return {"v": vh.reshape(r2, r1, *shape.kernel), "u": u.reshape(shape.out, -1)}

    def forward(
        self,
        x: Tensor,
        factors: Factors,
        shape: WeightShape,
        geometry: ConvGeometry | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Convolve with the basis and mix, or compose and convolve, whichever costs less for this input."""
        if geometry is not None and x.dim() == len(shape.kernel) + 1:  # one example without a batch axis
            return self.forward(x[None], factors, shape, geometry, bias)[0]
        positions = x.numel() // shape.inp
        if geometry is not None:
            positions //= math.prod(geometry.stride)
        if not self._bank_pays(shape, positions):
            return super().forward(x, factors, shape, geometry, bias)
        v, u = factors["v"], factors["u"]
        if geometry is None:
            return F.linear(F.linear(x.reshape(*x.shape[:-1], -1, v.shape[1]), v).flatten(-2), u, bias)
        # All groups share one basis, so they are treated as further images of the batch.
        batch, groups = x.shape[0], shape.inp // v.shape[1]
        features = convolve(x.reshape(batch * groups, v.shape[1], *x.shape[2:]), v, None, geometry)
        features = features.reshape(batch, groups * v.shape[0], *features.shape[2:])
        mix = u.view(*u.shape, *[1] * len(shape.kernel))
        return convolve(features, mix, bias, ConvGeometry.plain(len(shape.kernel)))

    def _macs_of_bank(self, shape: WeightShape, positions: int) -> int:
        r1, r2 = self.basis_of(shape)
        return (shape.inp * r2 * shape.area + shape.inp // r1 * r2 * shape.out) * positions

    def compose_macs(self, shape: WeightShape) -> int:
        """Count the product of coefficients and basis."""
        return shape.numel * self.basis_of(shape)[1]

    def _bank_pays(self, shape: WeightShape, positions: int) -> bool:
        r1, r2 = self.basis_of(shape)
        between, narrow = shape.inp // r1 * r2, shape.inp * r2 * shape.area * NARROW // r1
        overhead = (TRAFFIC * between + narrow) * positions
        return self._macs_of_bank(shape, positions) + overhead < super().macs(shape, positions)

    def macs(self, shape: WeightShape, positions: int) -> int:
        """Count the way that `forward` chooses at this number of positions."""
        return (
            self._macs_of_bank(shape, positions)
            if self._bank_pays(shape, positions)
            else super().macs(shape, positions)
        )


def _warn_if_dependent(r2: int, width: int) -> None:
    if r2 > width:
        text = f"r2 = {r2} basis kernels of {width} entries cannot be orthonormal, so the penalty cannot reach zero"
        warnings.warn(text, stacklevel=3)


def orthogonality(v: Tensor, strength: float = 10.0, *, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """Return the penalty on a basis (R2, R1, *kernel): `strength` times the squared entries of V V^T - I (Eq. 3).

    The `mean` over the R2 x R2 entries, weighted by 10, is what the authors ran; `sum` is Eq. 3 as printed.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    rows = v.flatten(1)
    squares = (rows @ rows.T - torch.eye(len(rows), dtype=v.dtype, device=v.device)).square()
    return strength * (squares.mean() if reduction == "mean" else squares.sum())
