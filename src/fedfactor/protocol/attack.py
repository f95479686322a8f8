"""Hostile clients, to try rules of aggregation against."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal

import torch
from pydantic import Field

from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.settings import Share, checked
from fedfactor.rng import numpy_rng


@checked
class Attack:
    """What a share of the clients does instead of sending what it has trained."""

    kind: Literal["sign_flip", "scale", "label_flip", "noise"]
    """Send the change scaled, with or without the opposite sign; train with wrong labels; or send noise of its size."""
    share: Annotated[float, Field(ge=0, le=1)]
    """Share of all clients that are hostile, the same ones in each round."""
    strength: Share = 10.0
    """Factor of the change that is sent, or of the noise; label_flip has none."""

    def hostile(self, seed: int, population: int) -> frozenset[int]:
        """Return the hostile clients."""
        return _drawn(seed, population, round(self.share * population))

    def spoilt(self, trained: Tensors, reference: Tensors, rng: torch.Generator) -> Tensors:
        """Return what a hostile client sends in place of its trained tensors."""
        found = dict(trained)
        for name, tensor in trained.items():
            if self.kind != "label_flip" and tensor.is_floating_point():
                change = tensor - reference[name]
                if self.kind == "noise":
                    drawn = torch.randn(change.shape, generator=rng, dtype=torch.float32).to(change)
                    change = drawn * change.square().mean().sqrt()
                factor = -self.strength if self.kind == "sign_flip" else self.strength
                found[name] = reference[name] + factor * change
        return found


@cache
def _drawn(seed: int, population: int, count: int) -> frozenset[int]:
    return frozenset(numpy_rng(seed, "attack").permutation(population)[:count].tolist())
