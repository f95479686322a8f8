"""How much of a trained model's accuracy factors keep: the table of docs/methods.md, in Markdown.

python -m benchmarks.given
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

import fedfactor
from fedfactor.data import federated, load
from fedfactor.models import build
from fedfactor.server.result import Result

ROUNDS: dict[str, Any] = {"epochs": 2, "batch_size": 16}
CASES: list[tuple[str, dict[str, float]]] = [
    ("fedpara", {"gamma": 0.1}),
    ("fedpara", {"gamma": 0.3}),
    ("fedpara", {"gamma": 0.5}),
    ("low_rank", {"ratio": 0.5}),
    ("pufferfish", {"ratio": 0.25}),
]


def perceptron() -> nn.Module:
    """Return a network without norms, whose weights learn more structure than those of a normed one."""
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(nn.Flatten(), *layers)


def accuracy(result: Result) -> str:
    """Measure the server's model on the central test set."""
    task = result.federation.setup.task
    assert task.data.central is not None
    return f"{100 * task.evaluate(result.model, task.data.central)['accuracy']:.1f} %"


def main() -> None:
    """Train two networks with FedAvg, and start each method from them."""
    warnings.simplefilter("ignore")  # about weights that random factors discard
    data = federated(load("digits"), clients=10)
    print("| network, method | dense | random factors | `given` | random, 2 rounds later | `given`, 2 rounds later |")
    print("|---|---|---|---|---|---|")
    networks: dict[str, tuple[Callable[[], nn.Module], int]] = {
        "perceptron": (perceptron, 40),
        "digits_cnn": (lambda: build("digits_cnn", classes=10, width=0.5), 10),
    }
    for name, (network, rounds_before) in networks.items():
        dense = fedfactor.simulate(network, data, rounds=rounds_before, lr=0.05, **ROUNDS)
        for method, options in CASES:
            cells = [f"{name}, `{method}`, {next(iter(options))} {next(iter(options.values()))}", accuracy(dense)]
            for rounds in (0, 2):
                for start in ("random", "given"):
                    chosen = fedfactor.create_method(method, start=start, **options)
                    cells.append(
                        accuracy(fedfactor.simulate(dense.model, data, method=chosen, rounds=rounds, lr=0.02, **ROUNDS))
                    )
            print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
