"""Small networks for tests."""

from __future__ import annotations

from torch import Tensor, nn


class Wide(nn.Module):
    """A network of a little more than a million weights, quickly trained on digits."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.more, self.fc = nn.Linear(64, 1000), nn.Linear(1000, 940), nn.Linear(940, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.more(self.hidden(x.flatten(1)).relu()).relu())


class Text(nn.Module):
    """An LSTM over the rows of a digit."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(8, int(8 * width), batch_first=True), nn.Linear(int(8 * width), 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x.squeeze(1))[0][:, -1])
