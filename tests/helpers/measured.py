"""What a training step of a live network keeps and computes."""

from __future__ import annotations

import torch
from torch import nn

from fedfactor import cost


class Measured:
    """What one step of training really keeps: bytes that autograd saves, products that are made."""

    def __init__(self, model: nn.Module) -> None:
        self.trace, self.elsewhere = cost._Trace(model), cost._Seen()
        self.trace._running.append(self.elsewhere)  # FjORD's narrower networks are no modules of the widest

    def __enter__(self) -> Measured:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept)
        self.hooks.__enter__()
        self.trace.__enter__()
        return self

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.trace.save(tensor)
        return tensor

    def __exit__(self, *error: object) -> None:
        self.trace.__exit__(*error)
        self.hooks.__exit__(*error)

    @property
    def macs(self) -> int:
        return self.elsewhere.macs + sum(seen.macs for seen in self.trace.modules.values())
