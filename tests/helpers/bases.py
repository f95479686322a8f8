"""Models with a frozen base, as users of adapters have them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    """A frozen network with a batch norm, and a bottleneck of 2,048 parameters, which alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.body = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.down, self.up = nn.Linear(128, 8, bias=False), nn.Linear(8, 128, bias=False)
        self.fc = nn.Linear(128, 10)
        self.requires_grad_(False)
        for layer in (self.down, self.up):
            layer.requires_grad_(True)
        self.bn.running_mean = torch.linspace(-0.1, 0.1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images, N x 1 x 8 x 8."""
        x = self.body(self.bn(self.conv(x)).flatten(1))
        logits: Tensor = self.fc(x + self.up(self.down(x)))
        return logits


def other_base() -> nn.Module:
    """Return the same network with another base."""
    model = Adapted()
    with torch.no_grad():
        model.fc.bias.add_(1)
    return model
