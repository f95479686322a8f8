"""Networks of the evidence that no paper has: small enough for hundreds of rounds on two processor cores."""

from __future__ import annotations

from torch import nn

from fedfactor.models.width import scaled


def three_convolutions(width: float = 1.0, classes: int = 10) -> nn.Sequential:
    """Return three convolutions without norms and a linear layer, for grey images of 28 x 28: 66,000 parameters."""
    first, second = scaled(32, width), scaled(64, width)
    return nn.Sequential(
        nn.Conv2d(1, first, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(first, second, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(second, second, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(second * 16, classes),
    )  # fmt: skip


def two_convolutions(width: float = 1.0, classes: int = 10) -> nn.Sequential:
    """Return two convolutions with pooling and two linear layers, for colour images of 32 x 32: 82,000 parameters."""
    first, second, hidden = scaled(16, width), scaled(32, width), scaled(128, width)
    return nn.Sequential(
        nn.Conv2d(3, first, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(second * 16, hidden), nn.ReLU(), nn.Linear(hidden, classes),
    )  # fmt: skip
