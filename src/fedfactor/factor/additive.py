"""FedDecomp's additive decomposition: a full-rank part plus a low-rank one (Eq. 2 to 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedfactor.factor.base import Factors, Scheme, WeightShape, check_range, normal, spread
from fedfactor.factor.spectral import ChannelSplit


@dataclass(frozen=True)
class Additive(Scheme):
    """W = sigma + B A, with sigma (O, I, *kernel) of full rank.

    Matrix: b (I, r), a (r, O), and B A is transposed to torch's (O, I). Convolution with a K1 x K2 kernel: b (I K1, r),
    a (r, O K2); B A is read as (I, K1, O, K2) and permuted to (O, I, K1, K2).

    `plain_view`, `rank_from_outputs` and `scaled` do what the authors' code does instead: b (O K, r) and a (r, I K),
    viewed as (O, I, K, K) without a permutation, so that a row of the product mixes channels; a rank that depends only
    on the outputs; and B A divided by the rank (for a convolution by the rank before the factor K).
    """

    linear: float = 0.6
    """R_l: rank of a matrix as a share of its smaller side."""
    conv: float = 0.6
    """R_c: rank of a convolution as a share of its smaller channel number, before the factor K."""
    plain_view: bool = False
    rank_from_outputs: bool = False
    scaled: bool = False
    rank: int | None = None
    """The rank itself, before the factor K; replaces `linear` and `conv`."""
    low_sigma: bool = False
    """Whether sigma is of the same low rank too, as `ChannelSplit` with factors u and v: for the change of a base."""
    name: ClassVar[str] = "additive"

    def rank_of(self, shape: WeightShape) -> int:
        """Return the inner size of B A: max(1, round(R min(I, O))) times K (the smaller kernel side)."""
        return self._base_rank(shape) * min(_kernel_sides(shape))

    def _base_rank(self, shape: WeightShape) -> int:
        if self.rank is not None:
            check_range("rank", self.rank, 1, min(shape.inp, shape.out), whole=True)
            return self.rank
        what, share = ("conv", self.conv) if shape.kernel else ("linear", self.linear)
        check_range(what, share, 0.0, 1.0)
        if self.rank_from_outputs:
            return max(1, int(share * shape.out))
        return max(1, round(share * min(shape.inp, shape.out)))

    def shapes(self, shape: WeightShape) -> dict[str, tuple[int, ...]]:
        """Return the sizes of sigma, b and a."""
        rank, (rows, columns) = self.rank_of(shape), self._sides(shape)
        sigma = self._sigma(shape).shapes(shape) if self.low_sigma else {"sigma": shape.size}
        return {**sigma, "b": (rows, rank), "a": (rank, columns)}

    def _sigma(self, shape: WeightShape) -> ChannelSplit:
        return ChannelSplit(rank=self._base_rank(shape))

    def as_change(self) -> Scheme:
        """Return the sum of a shared and a private low-rank part."""
        return replace(self, low_sigma=True)

    def zero(self, base: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return sigma = 0 and B = 0, with Gaussian V and A."""
        shape = WeightShape.of(base)
        if not self.low_sigma:
            return self.from_dense(torch.zeros_like(base), generator)
        return {**self._sigma(shape).zero(base, generator), **self._tau(base, generator)}

    def alpha_rank(self, shape: WeightShape) -> int | None:
        """Return the rank of sigma and, before the factor K, of tau, unless `scaled` divides by it already."""
        return None if self.scaled or not self.low_sigma else self._base_rank(shape)

    def _sides(self, shape: WeightShape) -> tuple[int, int]:
        first, last = _kernel_sides(shape)
        outer, inner = (shape.out, shape.inp) if self.plain_view else (shape.inp, shape.out)
        return outer * first, inner * last

    def init(
        self, shape: WeightShape, generator: torch.Generator | None = None, *, std: float | None = None
    ) -> Factors:
        """Draw sigma, and B A as in `from_dense`."""
        return self.from_dense(normal(shape.size, shape.he_std if std is None else std, generator), generator)

    def from_dense(self, weight: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return the weight as sigma, B = 0, and A Gaussian with standard deviation 1 / sqrt(3 I K1).

        The paper says only that A is Gaussian; this is the standard deviation of the authors' uniform distribution.
        """
        if self.low_sigma:
            shape = WeightShape.of(weight)
            return {**self._sigma(shape).from_dense(weight, generator), **self._tau(weight, generator)}
        return {"sigma": weight.clone(), **self._tau(weight, generator)}

    def _tau(self, weight: Tensor, generator: torch.Generator | None) -> Factors:
        shape = WeightShape.of(weight)
        sizes = self.shapes(shape)
        a = spread(sizes["a"], generator, shape.inp * _kernel_sides(shape)[0]).to(weight)
        return {"b": weight.new_zeros(sizes["b"]), "a": a}

    def low_rank(self, factors: Factors, shape: WeightShape) -> Tensor:
        """Return tau = B A in the weight's own shape."""
        product = factors["b"] @ factors["a"]
        if self.scaled:
            product = product / self._base_rank(shape)
        if self.plain_view:
            return product.reshape(shape.size)
        first, last = _kernel_sides(shape)
        return product.view(shape.inp, first, shape.out, last).permute(2, 0, 1, 3).reshape(shape.size)

    def as_product(self, factors: Factors, shape: WeightShape) -> tuple[Tensor, Tensor]:
        """Return the factors of sigma and tau side by side; of a kernel, tau mixes its positions with the channels."""
        if not self.low_sigma or shape.area != 1:
            return super().as_product(factors, shape)
        b, a = (factors["b"], factors["a"]) if self.plain_view else (factors["a"].T, factors["b"].T)
        b = b / self._base_rank(shape) if self.scaled else b
        u, v = self._sigma(shape).as_product(factors, shape)
        return torch.cat([u, b], 1), torch.cat([v, a.reshape(-1, *v.shape[1:])])

    def compose(self, factors: Factors, shape: WeightShape) -> Tensor:
        """Return sigma + B A."""
        sigma = self._sigma(shape).compose(factors, shape) if self.low_sigma else factors["sigma"]
        return sigma + self.low_rank(factors, shape)

    def compose_macs(self, shape: WeightShape) -> int:
        """Count the product B A, and that of sigma if it is one."""
        rows, columns = self._sides(shape)
        sigma = self._sigma(shape).compose_macs(shape) if self.low_sigma else 0
        return rows * self.rank_of(shape) * columns + sigma


def _kernel_sides(shape: WeightShape) -> tuple[int, int]:
    """Return (K1, K2): 1 x 1 for a matrix, k x 1 for a 1-d kernel."""
    first, last = (*shape.kernel, 1, 1)[:2]
    return first, last
