"""Splitting a data set over clients, with a central test set and test data for each client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from fedfactor.data.clients import Examples, FederatedData, Transform, count, rows
from fedfactor.data.dataset import Dataset, Datasets, Labels
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
    dataset: Dataset | Datasets,
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
    of each owner's training examples is held out instead. A test set without owners only measures the global model of
    natural owners.

    Args:
        dataset: The data set: arrays, or map-style datasets.
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
    train_rows, test_rows, tests = _parts(dataset, partition, test_share, seed)
    if 0 < test_limit < len(test_rows):
        test_rows = np.sort(numpy_rng(seed, "test-limit").choice(test_rows, test_limit, replace=False))
    train_parts, test_parts = partition.split(
        _view(dataset, False, train_rows, partition),
        _view(dataset, tests, test_rows, partition),
        numpy_rng(seed, "partition"),
    )
    if take:
        train_parts, test_parts = _some_clients(train_parts, test_parts, take, seed)
    if train_share != 1:
        train_parts = _some_examples(train_parts, train_share, seed)
    held_parts = train_parts
    if validation_share:
        train_parts, held_parts = _held_out(dataset, partition, train_rows, train_parts, validation_share, seed)
    if evaluate_on == "validation":
        if not validation_share:
            raise ValueError('evaluate_on = "validation" needs examples that are held out: set validation_share')
        used = np.unique(np.concatenate(held_parts))
        tests, test_rows = False, train_rows[used]
        test_parts = [np.searchsorted(used, part) for part in held_parts]
    elif partition.by_owner and not (tests and dataset.test_ids is None):
        # Only examples of owners who take part: others would not measure these clients.
        used = np.unique(np.concatenate(test_parts))
        test_parts = [np.searchsorted(used, part) for part in test_parts]
        test_rows = test_rows[used]
    central = _taken(dataset.examples(test=tests), test_rows) if len(test_rows) else None
    return FederatedData(
        dataset.examples(),
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


def _parts(dataset: Dataset | Datasets, partition: Partition, share: float, seed: int) -> tuple[Rows, Rows, bool]:
    """Return the rows to train on, the rows to test on, and whether the latter are rows of the test set."""
    ids, test_ids = dataset.train_ids, dataset.test_ids
    shared = ids is not None and test_ids is not None and len(np.intersect1d(ids[ids >= 0], test_ids[test_ids >= 0]))
    number = len(dataset.labels(test=True, needed=False))
    if number and (shared or not partition.by_owner or test_ids is None):
        return _examples(len(dataset.labels(needed=False)), ids), _examples(number, test_ids), True
    groups = _groups(dataset, partition)
    train, test = hold_out(groups, share, numpy_rng(seed, "hold-out"), ordered=dataset.ordered, gap=dataset.gap)
    if not len(train):
        raise ValueError(
            f"{dataset.name}: no owner has enough examples to hold out a share of {share:g} for testing"
            + (f" and {dataset.gap:,} more that overlap with both parts" if dataset.gap else "")
        )
    return train, test, False


def _groups(dataset: Dataset | Datasets, partition: Partition) -> Labels:
    """Return the owner of each training example, or else its class: the same share of each is held out."""
    ids = dataset.train_ids
    return dataset.labels(needed=partition.needs_labels) if ids is None else ids


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


def _held_out(
    dataset: Dataset | Datasets, partition: Partition, rows: Rows, parts: Parts, share: float, seed: int
) -> tuple[Parts, Parts]:
    """Return the examples that each client trains on, and those that are held out for validation.

    Of ordered examples, the last ones of each owner are held out, as for testing. Otherwise each client holds out
    random examples, and keeps at least one. Clients may share examples: nobody trains on what another one holds out.
    """
    if not 0 < share < 1:
        raise ValueError(f"validation_share must lie in (0, 1), or be 0 to hold out nothing, got {share:g}")
    rng, held = numpy_rng(seed, "validation"), np.zeros(len(rows), bool)
    if dataset.ordered:
        owner = _groups(dataset, partition)[rows]
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


def _examples(number: int, ids: Labels | None) -> Rows:
    return np.arange(number) if ids is None else np.flatnonzero(ids >= 0)


def _view(dataset: Dataset | Datasets, test: bool, rows: Rows, partition: Partition) -> View:
    ids = dataset.test_ids if test else dataset.train_ids
    labels = dataset.labels(test=test, needed=partition.needs_labels)
    return View(np.asarray(labels[rows]), None if ids is None else np.asarray(ids[rows]))


def _taken(found: Examples, wanted: Rows) -> Examples:
    """Return some examples: the arrays themselves if all rows are wanted, otherwise a copy of them."""
    return found if len(wanted) == count(found) else rows(found, torch.from_numpy(wanted))
