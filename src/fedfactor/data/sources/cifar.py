"""CIFAR-10 and CIFAR-100 in their binary version; the Python version consists of pickles, which can run any code."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfactor.data.dataset import Dataset
from fedfactor.data.sources.cache import Draft, cached
from fedfactor.data.sources.files import check_labels, first, read_lines
from fedfactor.data.sources.mnist import pair
from fedfactor.data.sources.registry import missing
from fedfactor.registry import register

PIXELS = 3 * 32 * 32
FETCH = "mkdir -p {data} && curl -L https://www.cs.toronto.edu/~kriz/cifar-NUMBER-binary.tar.gz | tar -xz -C {data}"


@register("data", "cifar10", fetch=FETCH.replace("NUMBER", "10"))
def cifar10(folder: Path) -> Dataset:
    """CIFAR-10: 32 x 32 colour images of 10 classes, 50,000 for training and 10,000 for testing."""
    return _binary("cifar10", folder, "cifar-10-batches-bin", "data_batch_*.bin", "test_batch.bin", "batches.meta.txt")


@register("data", "cifar100", fetch=FETCH.replace("NUMBER", "100"))
def cifar100(folder: Path) -> Dataset:
    """CIFAR-100: 32 x 32 colour images of 100 classes, 50,000 for training and 10,000 for testing."""
    return _binary("cifar100", folder, "cifar-100-binary", "train.bin", "test.bin", "fine_label_names.txt")


def _binary(name: str, folder: Path, inside: str, train: str, test: str, names: str) -> Dataset:
    """Read rows of label bytes (the last one is the class) and red, green and blue planes."""
    places = [folder / inside, folder / name / inside]
    place = first(places)
    files = {} if place is None else {"train": sorted(place.glob(train)), "test": sorted(place.glob(test))}
    if place is None or not all(files.values()):
        raise missing(name, folder, [root / file for root in places for file in (train, test)])
    if not (place / names).exists():
        raise ValueError(f"{place} is incomplete: expected the names of the classes in {names}")
    classes = tuple(read_lines(place / names))
    label_bytes = 2 if name == "cifar100" else 1

    def build(draft: Draft) -> None:
        for part, paths in files.items():
            rows = np.concatenate([_rows(path, label_bytes, len(classes)) for path in paths])
            draft.put(f"{part}_x", rows[:, label_bytes:].reshape(-1, 3, 32, 32))
            draft.put(f"{part}_y", rows[:, label_bytes - 1].astype(np.int64))

    made_from = [*files["train"], *files["test"], place / names]
    arrays, _ = cached(folder, name, made_from, {}, build)
    return Dataset(name, pair(arrays, "train"), pair(arrays, "test"), classes, norm=name)


def _rows(path: Path, label_bytes: int, classes: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    data = np.fromfile(path, np.uint8)
    width = label_bytes + PIXELS
    if not len(data) or len(data) % width:
        raise ValueError(f"{path} is damaged: expected a multiple of {width:,} bytes, got {len(data):,}")
    rows = data.reshape(-1, width)
    check_labels(path, rows[:, label_bytes - 1], classes)
    return rows
