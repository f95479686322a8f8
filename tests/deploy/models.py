"""Networks for tests of deployments."""

from __future__ import annotations

from torch import Tensor, nn


class Wide(nn.Module):
    """A network of a little more than a million weights, quickly trained on digits."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.more, self.fc = nn.Linear(64, 1000), nn.Linear(1000, 940), nn.Linear(940, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.more(self.hidden(x.flatten(1)).relu()).relu())
