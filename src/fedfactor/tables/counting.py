"""Networks without weights, built once, and counts on them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fedfactor.models import build


@cache
def network(name: str, **options: Any) -> nn.Module:
    """Return a registered network on the meta device. It is shared: do not change it.

    It is in evaluation mode, where normalisation is traced faster; no figure here depends on the mode.
    """
    with torch.device("meta"):
        return build(name, **options).eval()


def images(batch: int, side: int, channels: int = 3) -> Tensor:
    """Return a batch of square images on the meta device."""
    return torch.empty((batch, channels, side, side), device="meta")


def parameters(model: nn.Module) -> int:
    """Count the parameters of a model, without buffers (running statistics), as the papers do."""
    return sum(p.numel() for p in model.parameters())
