"""OrthDrop: ordered dropout in the orthogonal space, PriSM's baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedfactor.methods.prism import PriSM
from fedfactor.protocol.method import Participant
from fedfactor.registry import register


@register("methods", "orthdrop", paper="arXiv:2208.13141")
@dataclass(frozen=True)
class OrthDrop(PriSM):
    """PriSM with the same leading kernels for all clients and rounds (Sec. 4).

    Use it as PriSM's baseline with a fixed choice of kernels.
    """

    def drawn(self, sigma: Tensor, count: int, who: Participant, rng: torch.Generator) -> Tensor:
        """Return the indices of the kernels with the largest singular values."""
        return torch.arange(count)
