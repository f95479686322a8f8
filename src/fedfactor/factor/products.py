"""Sums of many low-rank products."""

from __future__ import annotations

import torch
from torch import Tensor

from fedfactor.factor.base import WeightShape
from fedfactor.factor.spectral import SpatialSplit


class Products:
    """A sum of products U V of many ranks: all U side by side times all V stacked."""

    def __init__(self) -> None:
        self._batch: list[tuple[Tensor, Tensor]] = []
        self._starts: list[tuple[list[Tensor], Tensor]] = []

    def add(self, u: Tensor, v: Tensor) -> None:
        """Add U V. V is copied: it may be a part of a larger buffer."""
        self._batch.append((u, v.clone()))

    def add_change(self, new: list[Tensor], old: list[Tensor], share: float) -> None:
        """Add a share of U V - U0 V0 = (U - U0) V + U0 (V - V0), which is exactly 0 where nothing changed.

        Clients that started from the same factors share the second product.
        """
        self.add((new[0] - old[0]) * share, new[1])
        moved = (new[1] - old[1]) * share
        for start, total in self._starts:
            if all(torch.equal(a, b) for a, b in zip(start, old, strict=True)):
                total.add_(moved)
                return
        self._starts.append((old, moved))

    def _collected(self) -> list[tuple[Tensor, Tensor]]:
        """Return the products that are not summed yet; they are forgotten here."""
        found = self._batch + [(old[0], moved) for old, moved in self._starts]
        self._batch, self._starts = [], []
        return found


class ComposedProducts(Products):
    """A sum that is added to a weight in batches, which have at most as many numbers as the weight and one product."""

    def __init__(self, into: Tensor) -> None:
        super().__init__()
        self._into = into

    def add(self, u: Tensor, v: Tensor) -> None:
        """Add U V."""
        super().add(u, v)
        if sum(u.numel() + v.numel() for u, v in self._batch) >= self._into.numel():
            self._compose(self._batch)
            self._batch = []

    def compose(self) -> None:
        """Add all products that are not added yet."""
        self._compose(self._collected())

    def _compose(self, batch: list[tuple[Tensor, Tensor]]) -> None:
        if batch:
            factors = {"u": torch.cat([u for u, _ in batch], 1), "v": torch.cat([v for _, v in batch], 0)}
            self._into.add_(SpatialSplit().compose(factors, WeightShape.of(self._into)))


class StackedProducts(Products):
    """A sum that stays in factors, which are reduced when they have twice as many columns as the sum can have rank."""

    def add(self, u: Tensor, v: Tensor) -> None:
        """Add U V."""
        super().add(u, v)
        most = min(u[:, 0].numel(), v[0].numel())
        if sum(len(v) for _, v in self._batch) > 2 * most:
            self._batch = [_leading(self._batch, most)]

    def scale(self, factor: float) -> None:
        """Multiply the sum."""
        self._batch = [(u * factor, v) for u, v in self._collected()]

    def decomposed(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return U S and V^T of the leading singular components of the sum, in the shapes of the added factors."""
        return _leading(self._collected(), rank)


def _leading(products: list[tuple[Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor]:
    """Return U S and V^T of the leading singular components of a sum of products.

    The sum itself is not computed: QR of both stacked factors leaves a core that is no larger than their number of
    columns.
    """
    left, right = (torch.cat([p[i].flatten(1) for p in products], 1 - i) for i in (0, 1))
    q_left, r_left = torch.linalg.qr(left.double())
    q_right, r_right = torch.linalg.qr(right.double().T)
    u, s, vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    u, v = q_left @ u[:, :rank] * s[:rank], vh[:rank] @ q_right.T
    first, last = products[0]
    return u.to(first.dtype).view(-1, rank, *first.shape[2:]), v.to(last.dtype).view(rank, *last.shape[1:])


class WeightedProducts:
    """A weighted mean of products U V, in factors as long as these have fewer numbers than the mean itself."""

    def __init__(self) -> None:
        self._parts: list[tuple[float, Tensor, Tensor]] = []
        self._sum: Tensor | None = None
        self._total = 0.0

    def add(self, share: float, u: Tensor, v: Tensor) -> None:
        """Add U V with this weight. Both are copied."""
        self._total += share
        self._parts.append((share, u.flatten(1).clone(), v.clone()))
        if sum(u.numel() + v.numel() for _, u, v in self._parts) >= len(u) * v[0].numel():
            self._sum = self._composed()

    def mean(self) -> dict[str, Tensor]:
        """Return factors `u` and `v` of the mean, or the mean itself as `w`."""
        if self._sum is not None:
            return {"w": self._composed() / self._total}
        return _stacked([(share / self._total * u, v) for share, u, v in self._parts])

    def residual(self, u: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Return the mean of the products minus the product of their means U and V, in the same form as `mean`.

        It is the sum of w_k (U_k - U) (V_k - C) for any C: with the last V_k as C, the last client adds nothing.
        """
        if self._sum is not None:
            return {"w": self._composed() / self._total - product(u, v)}
        *others, (_, _, last) = self._parts
        return _stacked([(share / self._total * (own - u.flatten(1)), v - last) for share, own, v in others])

    def _composed(self) -> Tensor:
        """Return the sum; what was in factors is added to it."""
        stacked = _stacked([(share * u, v) for share, u, v in self._parts])
        self._parts = []
        found = [part for part in (self._sum, product(**stacked) if stacked else None) if part is not None]
        return sum(found[1:], found[0])


def _stacked(products: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return factors of a sum of products; none if there are no products."""
    if not products:
        return {}
    return {"u": torch.cat([u for u, _ in products], 1), "v": torch.cat([v for _, v in products], 0)}


def product(u: Tensor, v: Tensor) -> Tensor:
    """Return U V in the shape of V with the rows of U: a convolution has V as its kernel."""
    return (u.flatten(1) @ v.flatten(1)).view(len(u), *v.shape[1:])
