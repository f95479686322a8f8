"""Splitting a data set over clients, with a central test set and test data for each client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from fedfactor.data.clients import Examples, FederatedData, Transform
from fedfactor.data.dataset import Array, Dataset, Labels
from fedfactor.data.partitions import Partition, View
from fedfactor.data.splitting import Parts, hold_out
from fedfactor.registry import create
from fedfactor.rng import numpy_rng

Rows = Labels

SHARED = {
    "seed": "seed of the split and of what is taken from it",
    "take": "keep this many of the clients, at random; 0: all",
    "train_share": "share of each client's training examples to keep",
    "own_test": "give each client test data of its own",
    "test_share": "share of the examples to hold out for testing where the data set has no fitting test set",
    "test_limit": "keep this many test examples, at random; 0: all",
    "validation_share": "share of each client's training examples to hold out, in (0, 1); 0: none",
    "evaluate_on": "measure on test data, or on the training examples that are held out (validation)",
}
"""Options of all partitions, and what they mean."""


def federated(
    dataset: Dataset,
    kind: str | Partition | Mapping[str, Any] = "iid",
    *,
    seed: int = 0,
    take: int = 0,
    train_share: float = 1.0,
    own_test: bool = True,
    test_share: float = 0.2,
    test_limit: int = 0,
    validation_share: float = 0.0,
    evaluate_on: Literal["test", "validation"] = "test",
    transform: Transform | None = None,
    **options: Any,
) -> FederatedData:
    """Split a data set over clients. Arrays are not copied.

    The central test set is the data set's. Each client gets a part of it with the class proportions of its training
    data. If the data set has no test set, or if clients are natural owners and the test set has other owners, a share
    of each owner's training examples is held out instead.

    Args:
        dataset: The data set.
        kind: A partition, its name, or a table with its name (`kind`) and its options.
        seed: Seed of the split and of everything that is taken from it at random.
        take: Keep this many clients, at random. 0: all.
        train_share: Share of each client's training examples to keep.
        own_test: Whether clients get test data of their own.
        test_share: Share of examples to hold out for testing, where that is needed.
        test_limit: Keep this many test examples, at random. 0: all.
        validation_share: Share of each client's training examples to hold out: nobody trains on them. 0: none.
        evaluate_on: "validation" replaces the test data: the central test set by all examples that were held out, and
            each client's own test data by those of its own.
        transform: What turns stored inputs into what networks read; by default the data set's.
        options: The fields of the partition, where `kind` is a name.
    """
    partition = _partition(kind, options)
    train_rows, test_rows, tested, tested_ids = _parts(dataset, partition, test_share, seed)
    if 0 < test_limit < len(test_rows):
        test_rows = np.sort(numpy_rng(seed, "test-limit").choice(test_rows, test_limit, replace=False))
    train_parts, test_parts = partition.split(
        _view(dataset.train, dataset.train_ids, train_rows),
        _view(tested, tested_ids, test_rows),
        numpy_rng(seed, "partition"),
    )
    if take:
        train_parts, test_parts = _some_clients(train_parts, test_parts, take, seed)
    if train_share != 1:
        train_parts = _some_examples(train_parts, train_share, seed)
    held_parts = train_parts
    if validation_share:
        train_parts, held_parts = _held_out(dataset, train_rows, train_parts, validation_share, seed)
    if evaluate_on == "validation":
        if not validation_share:
            raise ValueError('evaluate_on = "validation" needs examples that are held out: set validation_share')
        used = np.unique(np.concatenate(held_parts))
        tested, test_rows = dataset.train, train_rows[used]
        test_parts = [np.searchsorted(used, part) for part in held_parts]
    elif partition.by_owner:
        # Only examples of owners who take part: others would not measure these clients.
        used = np.unique(np.concatenate(test_parts))
        test_parts = [np.searchsorted(used, part) for part in test_parts]
        test_rows = test_rows[used]
    central = _taken(tested, test_rows) if len(test_rows) else None
    return FederatedData(
        _tensors(dataset.train),
        [torch.from_numpy(train_rows[part]) for part in train_parts],
        central,
        [torch.from_numpy(part) for part in test_parts] if own_test and central is not None else None,
        transform or dataset.transform,
        validation=evaluate_on == "validation",
    )


def _partition(kind: str | Partition | Mapping[str, Any], options: dict[str, Any]) -> Partition:
    chosen: Any = kind
    if isinstance(kind, Mapping):
        options = {"kind": "iid", **kind, **options}
        chosen = options.pop("kind")
    if isinstance(chosen, str):
        chosen, options = create("partitions", chosen, **options), {}
    if options:
        raise ValueError(f"options are only for a partition that is given by name, got {', '.join(options)}")
    assert isinstance(chosen, Partition)
    return chosen


def _parts(
    dataset: Dataset, partition: Partition, share: float, seed: int
) -> tuple[Rows, Rows, tuple[Array, Labels], Labels | None]:
    """Return the rows to train on, the rows to test on, and the arrays and owners to which the test rows refer."""
    ids, test_ids = dataset.train_ids, dataset.test_ids
    shared = ids is not None and test_ids is not None and len(np.intersect1d(ids[ids >= 0], test_ids[test_ids >= 0]))
    if len(dataset.test[1]) and (shared or not partition.by_owner):
        return _examples(dataset.train, ids), _examples(dataset.test, test_ids), dataset.test, test_ids
    # Without owners, the same share of each class is held out.
    groups = dataset.train[1] if ids is None else ids
    train, test = hold_out(groups, share, numpy_rng(seed, "hold-out"), ordered=dataset.ordered, gap=dataset.gap)
    if not len(train):
        raise ValueError(
            f"{dataset.name}: no owner has enough examples to hold out a share of {share:g} for testing"
            + (f" and {dataset.gap:,} more that overlap with both parts" if dataset.gap else "")
        )
    return train, test, dataset.train, ids


def _some_clients(train: Parts, test: Parts, take: int, seed: int) -> tuple[Parts, Parts]:
    if not 0 < take <= len(train):
        raise ValueError(f"take must be between 1 and the {len(train):,} clients there are (0: all), got {take:,}")
    chosen = np.sort(numpy_rng(seed, "take").choice(len(train), take, replace=False))
    return [train[client] for client in chosen], [test[client] for client in chosen]


def _some_examples(parts: Parts, share: float, seed: int) -> Parts:
    """Keep a share of each client's examples, at least one."""
    if not 0 < share <= 1:
        raise ValueError(f"train_share must lie in (0, 1], got {share:g}")
    rng = numpy_rng(seed, "train-share")
    return [np.sort(rng.choice(part, max(1, round(share * len(part))), replace=False)) for part in parts]


def _held_out(dataset: Dataset, rows: Rows, parts: Parts, share: float, seed: int) -> tuple[Parts, Parts]:
    """Return the examples that each client trains on, and those that are held out for validation.

    Of ordered examples, the last ones of each owner are held out, as for testing. Otherwise each client holds out
    random examples, and keeps at least one. Clients may share examples: nobody trains on what another one holds out.
    """
    if not 0 < share < 1:
        raise ValueError(f"validation_share must lie in (0, 1), or be 0 to hold out nothing, got {share:g}")
    rng, held = numpy_rng(seed, "validation"), np.zeros(len(rows), bool)
    if dataset.ordered:
        owner = (dataset.train[1] if dataset.train_ids is None else dataset.train_ids)[rows]
        kept, last = hold_out(owner, share, rng, ordered=True, gap=dataset.gap)
        held[last] = True
        unused = np.isin(owner, owner[last])  # owners with too few examples to hold some out train on all of them
        unused[kept] = False
    else:
        priority = rng.permutation(len(rows))  # the same for all clients, so that those with the same examples agree
        for part in parts:
            count = min(max(1, round(share * len(part))), len(part) - 1)
            held[part[np.argsort(priority[part])[:count]]] = True
        unused = held
    if not held.any():
        raise ValueError(f"{dataset.name}: no client has enough examples for a validation_share of {share:g}")
    return [part[~unused[part]] for part in parts], [part[held[part]] for part in parts]


def _examples(examples: tuple[Array, Labels], ids: Labels | None) -> Rows:
    return np.arange(len(examples[1])) if ids is None else np.flatnonzero(ids >= 0)


def _view(examples: tuple[Array, Labels], ids: Labels | None, rows: Rows) -> View:
    return View(np.asarray(examples[1][rows]), None if ids is None else np.asarray(ids[rows]))


def _taken(examples: tuple[Array, Labels], rows: Rows) -> Examples:
    """Return rows of arrays: the arrays themselves if all rows are wanted, otherwise a copy."""
    if len(rows) == len(examples[1]):
        return _tensors(examples)
    return _tensors((np.asarray(examples[0][rows]), np.asarray(examples[1][rows])))


def _tensors(examples: tuple[Array, Labels]) -> Examples:
    return torch.from_numpy(examples[0]), torch.from_numpy(examples[1])
