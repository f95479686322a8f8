"""Networks without weights, built once, and what is counted on them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fedfactor.models import build


@cache
def network(name: str, **options: Any) -> nn.Module:
    """Build a registered network on the meta device, where only shapes exist; do not change it, it is shared.

    In evaluation mode, in which normalisation is traced faster; no figure here depends on the mode.
    """
    with torch.device("meta"):
        return build(name, **options).eval()


def images(batch: int, side: int, channels: int = 3) -> Tensor:
    """Return a batch of square images without pixels."""
    return torch.empty((batch, channels, side, side), device="meta")


def parameters(model: nn.Module) -> int:
    """Count a model's parameters; buffers (running statistics) are left out, as the papers do."""
    return sum(p.numel() for p in model.parameters())
