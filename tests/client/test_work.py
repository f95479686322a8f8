"""The client's own step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedfactor
from fedfactor.client.work import batches
from fedfactor.data.clients import FederatedData
from fedfactor.protocol.settings import Training
from fedfactor.protocol.setup import Setup
from fedfactor.registry import create
from fedfactor.runs.simulate import simulate
from fedfactor.task import Task
from tests.helpers.quadratic import Point, clients, x
from tests.helpers.quadratic import run as quadratic
from tests.helpers.tiny import OPTIMIZERS, data


def setup(training: Training) -> Setup:
    fedavg = create("methods", "fedavg"), create("optimizers", "fedavg"), create("codecs", "float32")
    return Setup(Task(nn.Identity, data()), *fedavg, training)


@pytest.mark.parametrize(("examples", "sizes"), [(25, [10, 10, 5]), (20, [10, 10]), (21, [10, 11]), (7, [7])], ids=str)
def test_an_epoch_is_every_example_once_the_last_smaller_batch_included(examples: int, sizes: list[int]) -> None:
    both = torch.arange(float(examples)), torch.arange(examples)
    found = list(batches(setup(Training(batch_size=10)), both, 2, torch.Generator().manual_seed(0)))
    assert [len(y) for _, y in found] == 2 * sizes
    first, second = (torch.cat([y for _, y in half]).tolist() for half in (found[: len(sizes)], found[len(sizes) :]))
    assert sorted(first) == sorted(second) == list(range(examples)) and first != second
    assert all(torch.equal(x, y.float()) for x, y in found)


class Words(nn.Module):
    """Means of word vectors, and a classifier."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.fc = nn.Embedding(20, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.table(x).mean(1))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sparse_gradients_of_an_embedding_are_gradients_like_others(optimizer: str) -> None:
    rng = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(20, (12, 5), generator=rng), torch.randint(3, (12,), generator=rng)
    words = FederatedData((inputs, targets), [torch.arange(6), torch.arange(6, 12)])
    settings = {"rounds": 2, "lr": 0.1, "batch_size": 3, "momentum": 0.9, "weight_decay": 0.01, "max_grad_norm": 1.0}
    dense, sparse = (simulate(Words(sparse), words, optimizer=optimizer, **settings) for sparse in (False, True))
    assert sparse.summary["weights_sha256"] == dense.summary["weights_sha256"]


def test_a_last_batch_of_one_joins_the_one_before() -> None:
    result = fedfactor.simulate(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)),
        (data().train[0][:42], data().train[1][:42]),
        clients=2,
        batch_size=20,
        rounds=1,
    )
    assert result.summary["totals"]["failures"] == 0


def test_local_steps_are_torchs_own_sgd() -> None:
    """Momentum and weight decay over several steps of one client, against torch.optim.SGD, to the bit."""
    one = clients((1.0, 1.0))
    found = x(quadratic(data=one, epochs=7, momentum=0.9, weight_decay=0.1, lr=0.05))
    point = Point().double()
    sgd = torch.optim.SGD(point.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, fused=True)
    for _ in range(7):
        sgd.zero_grad()
        (0.5 * (point.x - 1) ** 2).mean().backward()
        sgd.step()
    assert found == float(point.x.detach())
