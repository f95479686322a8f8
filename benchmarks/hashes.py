"""Print the hashes of a short run of every registered method, and of every optimizer and codec with FedAvg.

`python -m benchmarks.hashes > before.txt` on one commit and again on another, on the same machine: `diff` shows which
results have moved. A change that is meant to move nothing leaves the two files equal.

The network is written out here, not taken from `fedfactor.testing`, so that this file also runs on older commits.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedfactor
from fedfactor.registry import create, entries

FIELDS = {"pufferfish": {"warmup": 1}, "fedhm": {"distill": 0.5, "static_norm": True}}
"""Settings under which a short run shows more of what a method does."""


class Net(nn.Module):
    """Two convolutions with batch norm, a hidden layer and a classifier called `fc`."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        a, b, c = int(8 * width), int(16 * width), int(32 * width)
        self.conv1, self.bn1 = nn.Conv2d(1, a, 3, padding=1), nn.BatchNorm2d(a)
        self.conv2, self.bn2 = nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b)
        self.hidden, self.fc = nn.Linear(b * 16, c), nn.Linear(c, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = self.bn2(self.conv2(x)).relu()
        return self.fc(self.hidden(x.flatten(1)).relu())


def hashes(method: str = "fedavg", **parts: str) -> str:
    """Run three rounds of three out of six clients and return both hashes."""
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = images.float().reshape(-1, 1, 8, 8) / 16
    settings: dict[str, Any] = {"rounds": 3, "cohort": 3, "epochs": 2, "lr": 0.05, "momentum": 0.9, "seed": 5}
    result = fedfactor.simulate(
        Net, (x[:300], labels[:300]), test=(x[1500:], labels[1500:]), clients=6, alpha=1.0,
        method=create("methods", method, **FIELDS.get(method, {})), capacities={1.0: 0.5, 0.5: 0.5},
        weight_decay=1e-3, **parts, **settings,
    )  # fmt: skip
    return f"{result.summary['weights_sha256']} {result.summary['private_sha256']}"


def main() -> None:
    for method in entries("methods"):
        print("method", method, hashes(method), flush=True)
    for kind in ("optimizers", "codecs"):
        for name in entries(kind):
            print(kind.removesuffix("s"), name, hashes(**{kind.removesuffix("s"): name}), flush=True)


if __name__ == "__main__":
    main()
