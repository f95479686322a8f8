"""Partitions by the Partitioners of flwr-datasets: with a stand-in for the packages, and with the packages."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from fedfactor.data import Dataset, counts, federated
from fedfactor.data.partitions import from_flower
from tests.helpers import made_data as make


def dataset() -> Dataset:
    """400 images of four classes for training, 100 for testing."""
    train, test = ((make.pixels(n, 1, 4, 4), np.arange(n) % 4) for n in (400, 100))
    return Dataset("made", train, test, tuple("abcd"))


class Rows:
    """Stands for datasets.Dataset."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns

    from_dict = classmethod(lambda cls, columns: cls(columns))

    def __getitem__(self, name: str) -> Any:
        return list(self.columns[name])


class EveryNth:
    """Stands for a Partitioner: the interface is a dataset, a number and partitions."""

    def __init__(self, num_partitions: int, partition_by: str = "label") -> None:
        self.num_partitions, self.by = num_partitions, partition_by
        self.dataset: Rows

    def load_partition(self, number: int) -> Rows:
        mine = np.asarray(self.dataset.columns[self.by]) % self.num_partitions == number
        return Rows({name: np.asarray(column)[mine][::-1] for name, column in self.dataset.columns.items()})


def test_flower_partitioners(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "flwr_datasets", "flwr_datasets.partitioner"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["datasets"].Dataset = Rows  # type: ignore[attr-defined]
    sys.modules["flwr_datasets.partitioner"].EveryNth = EveryNth  # type: ignore[attr-defined]
    found = federated(dataset(), "flower", clients=2, partitioner="EveryNth")
    assert counts(found).tolist() == [[100, 0, 100, 0], [0, 100, 0, 100]]
    assert counts(found, test=True).tolist() == [[25, 0, 25, 0], [0, 25, 0, 25]]
    owners = from_flower(EveryNth(2, "owner"), np.zeros(6, np.int64), np.arange(6))
    assert [part.tolist() for part in owners] == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(ValueError, match="flwr_datasets has no partitioner called 'Nowhere'"):
        federated(dataset(), "flower", partitioner="Nowhere")


def test_flower_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", None)
    with pytest.raises(ImportError, match=r"needs flwr_datasets: pip install .*\[flower-datasets\]'"):
        federated(dataset(), "flower")


# The real packages.


@pytest.mark.huggingface
@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # datasets has not followed pyarrow yet
@pytest.mark.parametrize(
    ("partitioner", "options", "classes"),
    [
        ("IidPartitioner", {}, {4}),
        ("DirichletPartitioner", {"partition_by": "label", "alpha": 0.5, "min_partition_size": 5}, {1, 2, 3, 4}),
        (
            "PathologicalPartitioner",
            {"partition_by": "label", "num_classes_per_partition": 2, "class_assignment_mode": "deterministic"},
            {2},
        ),
        ("ShardPartitioner", {"partition_by": "label", "num_shards_per_partition": 2}, {1, 2}),
        ("LinearPartitioner", {}, {4}),
    ],
)
def test_partitioners_of_flwr_datasets(partitioner: str, options: dict[str, Any], classes: set[int]) -> None:
    settings = {"clients": 4, "partitioner": partitioner, "options": options}
    found, again = (federated(dataset(), "flower", seed=3, **settings) for _ in range(2))
    parts = [part.tolist() for part in found.train_of]
    rows = [row for part in parts for row in part]
    assert len(parts) == 4 and len(rows) == len(set(rows)) >= 390 and set(rows) <= set(range(400))
    assert parts == [part.tolist() for part in again.train_of]
    assert set((counts(found) > 0).sum(1).tolist()) <= classes


@pytest.mark.huggingface
def test_natural_owners_of_flwr_datasets() -> None:
    from flwr_datasets.partitioner import NaturalIdPartitioner

    owners = from_flower(
        NaturalIdPartitioner(partition_by="owner"), np.zeros(6, np.int64), np.array([2, 0, 2, 1, 1, 0])
    )
    assert sorted(part.tolist() for part in owners) == [[0, 2], [1, 5], [3, 4]]
