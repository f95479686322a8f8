"""Time series: each client has a sensor of its own; a GRU that all of them train predicts the next value."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedfactor

WINDOW = 24


class Sensor(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a noisy daily cycle with a phase and a height of its own, and the value that follows each window."""

    def __init__(self, seed: int, hours: int = 240) -> None:
        rng = torch.Generator().manual_seed(seed)
        phase, height = 6.28 * torch.rand((), generator=rng), 0.5 + torch.rand((), generator=rng)
        cycle = height * torch.sin(6.28 * torch.arange(hours) / 24 + phase)
        self.values = cycle + 0.05 * torch.randn(hours, generator=rng)

    def __len__(self) -> int:
        return len(self.values) - WINDOW

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        return self.values[start : start + WINDOW, None], self.values[start + WINDOW, None]


class Forecast(nn.Module):
    """A GRU over the window, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(1, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, window: Tensor) -> Tensor:
        """Return the next value."""
        value: Tensor = self.out(self.gru(window)[0][:, -1])
        return value


if __name__ == "__main__":
    result = fedfactor.simulate(
        Forecast, [Sensor(seed) for seed in range(6)], test=[Sensor(100 + seed) for seed in range(6)],
        kind="regression", metrics={"mae": "mae"}, best="mae", rounds=6, lr=0.01, local_optimizer=torch.optim.Adam,
    )  # fmt: skip
    print(f"mean absolute error {result.summary['best_mae']:.3f}")
