"""FedAvg and FedPara side by side on the digits that come with scikit-learn: accuracy, bytes, ratio."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

import fedfactor
from fedfactor.data import digits
from fedfactor.methods import FedAvg, FedPara, PFedPara

ROUNDS = 20


def model() -> nn.Module:
    """Three convolutions with group norm."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, stride=2, padding=1), nn.GroupNorm(2, 64), nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1), nn.GroupNorm(2, 128), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(128, 128, 3, padding=1), nn.GroupNorm(2, 128), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def main() -> None:
    """Run the three methods and print a table."""
    data = digits(clients=20, alpha=0.5)
    table = Table(
        "method", "accuracy", "clients' own", "bytes a round", "fewer bytes", title="digits, 20 clients, Dirichlet 0.5"
    )
    dense = 0.0
    with Progress() as progress:
        for method in (FedAvg(), FedPara(gamma=0.1), PFedPara(gamma=0.1)):
            task = progress.add_task(method.name, total=ROUNDS)
            result = fedfactor.simulate(
                model, data, method=method, rounds=ROUNDS, cohort=5, epochs=2, batch=16, lr=0.1, evaluate_every=5,
                on_event=lambda event, task=task: progress.advance(task, event["event"] == "round"),
            )  # fmt: skip
            summary = result.summary
            size = (summary["totals"]["bytes_down"] + summary["totals"]["bytes_up"]) / ROUNDS
            dense = dense or size
            shared = f"{summary['global']['final']:.3f}" if "global" in summary else "-"
            own = f"{summary['selected_after']['final']:.3f}"
            table.add_row(method.name, shared, own, f"{size / 1e6:.2f} MB", f"{dense / size:.1f}x")
    Console().print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
