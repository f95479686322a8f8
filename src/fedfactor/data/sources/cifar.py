"""CIFAR-10 and CIFAR-100 in their binary version; the Python version consists of pickles, which can run any code."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfactor.data.dataset import Dataset
from fedfactor.data.sources.cache import Draft, cached
from fedfactor.data.sources.files import check_labels, first, read_lines
from fedfactor.data.sources.mnist import pair
from fedfactor.data.sources.registry import check_whole, missing
from fedfactor.registry import register

PIXELS = 3 * 32 * 32
BATCHES = [f"data_batch_{number}.bin" for number in range(1, 6)]
FETCH = "mkdir -p {data} && curl -L https://www.cs.toronto.edu/~kriz/cifar-NUMBER-binary.tar.gz | tar -xz -C {data}"


@register("data", "cifar10", fetch=FETCH.replace("NUMBER", "10"))
def cifar10(folder: Path, partial: bool = False) -> Dataset:
    """CIFAR-10: 32 x 32 colour images of 10 classes, 50,000 for training and 10,000 for testing.

    `partial` accepts files that have fewer.
    """
    sizes = dict.fromkeys([*BATCHES, "test_batch.bin"], 10_000)
    return _binary("cifar10", folder, "cifar-10-batches-bin", sizes, "batches.meta.txt", partial)


@register("data", "cifar100", fetch=FETCH.replace("NUMBER", "100"))
def cifar100(folder: Path, partial: bool = False) -> Dataset:
    """CIFAR-100: 32 x 32 colour images of 100 classes, 50,000 for training and 10,000 for testing.

    `partial` accepts files that have fewer.
    """
    sizes = {"train.bin": 50_000, "test.bin": 10_000}
    return _binary("cifar100", folder, "cifar-100-binary", sizes, "fine_label_names.txt", partial)


def _binary(name: str, folder: Path, inside: str, sizes: dict[str, int], names: str, partial: bool) -> Dataset:
    """Read rows of label bytes (the last one is the class) and red, green and blue planes.

    `sizes` has the number of images in each file; the last file is the test set.
    """
    places = [folder / inside, folder / name / inside]
    place = first(places)
    there = [] if place is None else [place / file for file in sizes if (place / file).exists()]
    *train, test = sizes
    files = {part: [path for path in there if path.name in of] for part, of in (("train", train), ("test", [test]))}
    if place is None or not all(files.values()):
        raise missing(name, folder, [root / file for root in places for file in (train[0], test)])
    if not (place / names).exists():
        raise ValueError(f"{place} is incomplete: expected the names of the classes in {names}")
    classes = tuple(read_lines(place / names))
    label_bytes = 2 if name == "cifar100" else 1

    def build(draft: Draft) -> None:
        for part, paths in files.items():
            rows = np.concatenate([_rows(path, label_bytes, len(classes)) for path in paths])
            draft.put(f"{part}_x", rows[:, label_bytes:].reshape(-1, 3, 32, 32))
            draft.put(f"{part}_y", rows[:, label_bytes - 1].astype(np.int64))

    arrays, _ = cached(folder, name, [*there, place / names], {}, build)
    rows = {path.name: path.stat().st_size // (label_bytes + PIXELS) for path in there}
    found = {f"images in {file}": (rows.get(file, 0), size) for file, size in sizes.items()}
    check_whole(name, folder, found, partial)
    return Dataset(name, pair(arrays, "train"), pair(arrays, "test"), classes, norm=name)


def _rows(path: Path, label_bytes: int, classes: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    data = np.fromfile(path, np.uint8)
    width = label_bytes + PIXELS
    if not len(data) or len(data) % width:
        raise ValueError(f"{path} is damaged: expected a multiple of {width:,} bytes, got {len(data):,}")
    rows = data.reshape(-1, width)
    check_labels(path, rows[:, label_bytes - 1], classes)
    return rows
