"""Low rank: X Y^T for a matrix, Tucker's form for a convolution (the `low` baselines of FedPara)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedfactor.factor.base import ConvGeometry, Factors, Scheme, WeightShape, check_range, convolve, normal
from fedfactor.factor.spectral import ChannelSplit
from fedfactor.factor.svd import truncated_svd


@dataclass(frozen=True)
class LowRank(Scheme):
    """Matrix: W = X Y, x (O, r), y (r, I). Convolution: W = T x_1 X x_2 Y (Tucker on both channel axes, as in TKD).

    A convolution runs as 1 x 1 to r_i channels, k x k to r_o, 1 x 1 to O: y (r_i, I), t (r_o, r_i / blocks, *kernel),
    x (O, r_o): r_i I + r_o r_i k^2 / blocks + r_o O parameters.

    With `blocks` = 2 the core is block-diagonal, so the weight is a sum of two Tucker forms of half the rank: the
    2R(O + I + R k^2) that FedPara's Table 1 prints for its low-rank convolution.
    """

    ratio: float = 0.1
    """Rank as a share of the channels on each side (matrix: of the smaller side)."""
    rank: int | None = None
    """The rank itself, on both sides; replaces `ratio`."""
    blocks: int = 1
    """Number of blocks of the core; ranks are rounded up to a multiple of it."""
    name: ClassVar[str] = "low_rank"
    sequential: ClassVar[bool] = True

    def as_change(self) -> Scheme:
        """Return LoRA's form, which has no core: two layers in sequence, for convolutions too."""
        return ChannelSplit(ratio=self.ratio, rank=self.rank)

    def rank_of(self, shape: WeightShape) -> tuple[int, int]:
        """Return the rank of the outputs and that of the inputs; for a matrix both are the same."""
        highest = min(shape.out, shape.inp)
        check_range("blocks", self.blocks, 1, float("inf"), whole=True)
        if self.rank is not None:
            check_range("rank", self.rank, 1, highest, whole=True)
            both = self._blocked(self.rank) if shape.kernel else self.rank
            return both, both
        check_range("ratio", self.ratio, 0, 1)
        if not shape.kernel:
            both = max(1, round(self.ratio * highest))
            return both, both
        return (
            self._blocked(max(1, round(self.ratio * shape.out))),
            self._blocked(max(1, round(self.ratio * shape.inp))),
        )

    def _blocked(self, rank: int) -> int:
        return -(-rank // self.blocks) * self.blocks

    def shapes(self, shape: WeightShape) -> dict[str, tuple[int, ...]]:
        """Return the sizes of x, y and, for a convolution, the core t."""
        outer, inner = self.rank_of(shape)
        sides: dict[str, tuple[int, ...]] = {"x": (shape.out, outer), "y": (inner, shape.inp)}
        return sides if not shape.kernel else {**sides, "t": (outer, inner // self.blocks, *shape.kernel)}

    def init(
        self, shape: WeightShape, generator: torch.Generator | None = None, *, std: float | None = None
    ) -> Factors:
        """Return factors with the same standard deviation s.

        An entry of a composed matrix sums r products of two, an entry of a kernel r_o r_i / blocks products of three,
        so its variance is r s^4, or (r_o r_i / blocks) s^6.
        """
        std = shape.he_std if std is None else std
        outer, inner = self.rank_of(shape)
        each = (
            (std / outer**0.5) ** (1 / 2)
            if not shape.kernel
            else (std / (outer * inner / self.blocks) ** 0.5) ** (1 / 3)
        )
        return {name: normal(size, each, generator) for name, size in self.shapes(shape).items()}

    def compose(self, factors: Factors, shape: WeightShape) -> Tensor:
        """Multiply the factors out to (O, I, *kernel)."""
        x, y = factors["x"], factors["y"]
        if not shape.kernel:
            return x @ y
        b, t = self.blocks, factors["t"].flatten(1)
        left = torch.bmm(x.view(len(x), b, -1).transpose(0, 1), t.view(b, -1, t.shape[1]))
        # (blocks, O, r k k) -> (O k k, blocks r), so that one product adds the blocks up
        left = left.view(b, shape.out, -1, shape.area).permute(1, 3, 0, 2).reshape(shape.out * shape.area, -1)
        return (left @ y).view(shape.out, shape.area, shape.inp).mT.reshape(shape.size)

    def from_dense(self, weight: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return the truncated SVD of a matrix, or the leading subspaces of both channel unfoldings (HOSVD)."""
        shape = WeightShape.of(weight)
        outer, inner = self.rank_of(shape)
        if not weight.any():  # of factors that are all 0, none would ever get a gradient
            return {**self.init(shape, generator), "x": weight.new_zeros(shape.out, outer)}
        if not shape.kernel:
            u, s, vh = truncated_svd(weight, outer)
            return {"x": u * s.sqrt(), "y": s.sqrt()[:, None] * vh}
        if self.blocks != 1:
            return super().from_dense(weight)
        w = weight.flatten(2)
        x = _basis(w.flatten(1), min(outer, shape.fan_in))
        y = _basis(w.transpose(0, 1).flatten(1), min(inner, shape.out * shape.area)).T
        x, y = F.pad(x, (0, outer - x.shape[1])), F.pad(y, (0, 0, 0, inner - y.shape[0]))
        t = torch.einsum("oa,oik,bi->abk", x, w, y)
        return {"x": x, "y": y, "t": t.reshape(outer, inner, *shape.kernel)}

    def forward(
        self,
        x: Tensor,
        factors: Factors,
        shape: WeightShape,
        geometry: ConvGeometry | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Apply the factors one after another, without composing the weight."""
        if geometry is None:
            return F.linear(F.linear(x, factors["y"]), factors["x"], bias)
        point, axes = ConvGeometry.plain(len(shape.kernel)), (1,) * len(shape.kernel)
        x = convolve(x, factors["y"].view(*factors["y"].shape, *axes), None, point)
        x = convolve(x, factors["t"], None, geometry, groups=self.blocks)
        return convolve(x, factors["x"].view(*factors["x"].shape, *axes), bias, point)

    def compose_macs(self, shape: WeightShape) -> int:
        """Count X Y, or X T block by block and then Y."""
        outer, inner = self.rank_of(shape)
        if not shape.kernel:
            return shape.out * outer * shape.inp
        return shape.out * outer * (inner // self.blocks) * shape.area + shape.numel * inner

    def macs(self, shape: WeightShape, positions: int) -> int:
        """Count one multiply-accumulate per parameter and position: the factors run one after another."""
        return self.parameters(shape) * positions


def _basis(matrix: Tensor, rank: int) -> Tensor:
    """Return a basis of the leading left subspace, orthonormal to rounding; `truncated_svd` alone is less exact."""
    basis: Tensor = torch.linalg.qr(truncated_svd(matrix, rank)[0]).Q
    return basis
