"""FedAvg in plain PyTorch, without the library: what `fedfactor.simulate` does at its simplest."""

from __future__ import annotations

import copy

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

CLIENTS, COHORT, ROUNDS, EPOCHS, BATCH, RATE = 20, 5, 20, 2, 16, 0.1


def data(rng: np.random.Generator) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Deal the digits out to the clients; keep a fifth for testing."""
    raw = load_digits()
    x, y = torch.tensor(raw.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(raw.target)
    order = torch.from_numpy(rng.permutation(len(y)))
    test, train = order[:359], order[359:]
    return [(x[part], y[part]) for part in train.chunk(CLIENTS)], (x[test], y[test])


def train(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Train a client's copy of the model and return its weights."""
    model.train()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(y)).split(BATCH):
            sgd.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            sgd.step()
    return model.state_dict()


def mean(replies: list[dict[str, Tensor]], examples: list[int]) -> dict[str, Tensor]:
    """Average the clients' weights by their number of examples."""
    total = sum(examples)
    return {
        name: sum(reply[name] * (count / total) for reply, count in zip(replies, examples, strict=True))
        for name in replies[0]
    }


def main() -> float:
    """Run the rounds and return the accuracy of the global model."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    clients, (test_x, test_y) = data(rng)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for _ in range(ROUNDS):
        cohort = rng.choice(CLIENTS, size=COHORT, replace=False)
        replies = [train(copy.deepcopy(model), *clients[client]) for client in cohort]
        model.load_state_dict(mean(replies, [len(clients[client][1]) for client in cohort]))
    model.eval()
    with torch.no_grad():
        return float((model(test_x).argmax(1) == test_y).float().mean())


if __name__ == "__main__":
    print(f"accuracy {main():.3f}")
