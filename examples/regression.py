"""Regression on a table: five hospitals predict the progress of diabetes; the mean absolute error decides."""

from __future__ import annotations

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

import fedfactor

SPREAD = 77.0
"""The standard deviation of the targets, by which they are divided."""


def table() -> tuple[Tensor, Tensor]:
    """Return ten standardised features of 442 patients, and how far the disease has progressed a year later."""
    inputs, targets = (torch.as_tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    return inputs * len(inputs) ** 0.5, (targets[:, None] - 152) / SPREAD


def network() -> nn.Module:
    """Return a network with one hidden layer."""
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))


if __name__ == "__main__":
    inputs, targets = table()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    test, train = order[:88], order[88:]
    result = fedfactor.simulate(
        network, (inputs[train], targets[train]), test=(inputs[test], targets[test]), kind="regression", clients=5,
        metrics={"mae": "mae"}, best="mae", rounds=20, lr=0.02, evaluate_clients="none",
    )  # fmt: skip
    print(f"mean absolute error {SPREAD * result.summary['best_mae']:.1f}")
