"""Sums of many low-rank products."""

from __future__ import annotations

import torch
from torch import Tensor

from fedfactor.factor.base import WeightShape
from fedfactor.factor.spectral import SpatialSplit


class Products:
    """A sum of products U V of many ranks: one product of all U side by side with all V stacked."""

    def __init__(self) -> None:
        self._us: list[Tensor] = []
        self._vs: list[Tensor] = []
        self._starts: list[tuple[list[Tensor], Tensor]] = []

    def add(self, u: Tensor, v: Tensor) -> None:
        """Add U V."""
        self._us.append(u)
        self._vs.append(v)

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
        self.add(old[0], moved)

    def decomposed(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return U S and V^T of the leading singular components of the sum, in the shapes of the added factors.

        The sum itself is not computed: QR of both stacked factors leaves a core that is no larger than their number of
        columns.
        """
        left, right = torch.cat([u.flatten(1) for u in self._us], 1), torch.cat([v.flatten(1) for v in self._vs], 0)
        q_left, r_left = torch.linalg.qr(left.double())
        q_right, r_right = torch.linalg.qr(right.double().T)
        u, s, vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
        u, v = q_left @ u[:, :rank] * s[:rank], vh[:rank] @ q_right.T
        first, last = self._us[0], self._vs[0]
        return u.to(first.dtype).view(-1, rank, *first.shape[2:]), v.to(last.dtype).view(rank, *last.shape[1:])

    def composed(self, weight: Tensor) -> Tensor:
        """Return the sum in the shape of a weight."""
        if not self._us:
            return torch.zeros_like(weight)
        factors = {"u": torch.cat(self._us, 1), "v": torch.cat(self._vs, 0)}
        return SpatialSplit().compose(factors, WeightShape.of(weight))
