"""MNIST, Fashion-MNIST (idx files) and MNIST by writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfactor.data.dataset import Array, Dataset, Labels
from fedfactor.data.sources.cache import Draft, cached
from fedfactor.data.sources.files import check_labels, first, read_idx
from fedfactor.data.sources.registry import check_whole, missing
from fedfactor.registry import register

FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
FILES = ("train-images", "train-labels", "t10k-images", "t10k-labels")
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
FETCH = (
    "mkdir -p {data}/FOLDER/raw && cd {data}/FOLDER/raw && for f in train-images-idx3 train-labels-idx1 "
    "t10k-images-idx3 t10k-labels-idx1; do curl -LO URL/$f-ubyte.gz; done"
)


@register(
    "data",
    "mnist",
    fetch=FETCH.replace("FOLDER", "MNIST").replace("URL", "https://ossci-datasets.s3.amazonaws.com/mnist"),
)
def mnist(folder: Path, partial: bool = False) -> Dataset:
    """MNIST: 28 x 28 handwritten digits, 60,000 for training and 10,000 for testing; `partial` accepts fewer."""
    places = [folder / "MNIST" / "raw", folder / "mnist", folder]
    return _idx("mnist", folder, places, tuple("0123456789"), partial)


@register(
    "data",
    "fashion-mnist",
    fetch="apt install dataset-fashion-mnist` or `"
    + FETCH.replace("FOLDER", "FashionMNIST").replace(
        "URL", "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
    ),
)
def fashion_mnist(folder: Path, partial: bool = False) -> Dataset:
    """Fashion-MNIST: 28 x 28 images of clothes, 60,000 for training and 10,000 for testing; `partial` accepts fewer."""
    # The files have the same names as MNIST's, so they are searched in the data folder itself only without MNIST.
    places = [folder / "FashionMNIST" / "raw", folder / "fashion-mnist", DEBIAN]
    if not (folder / "MNIST").exists():
        places.append(folder)
    return _idx("fashion-mnist", folder, places, FASHION, partial)


@register(
    "data",
    "mnist-writers",
    fetch="cd {data} && for f in train test; do curl -LO "
    "https://raw.githubusercontent.com/facebookresearch/qmnist/master/qmnist-$f-labels.idx2-int.gz; done",
)
def mnist_writers(folder: Path, partial: bool = False) -> Dataset:
    """MNIST with its writers as natural owners: 539 in the training set, others in the test set.

    `partial` accepts files that have fewer images.
    """
    plain = mnist(folder, partial)
    writers, path = _writers(folder)
    for ids, examples in zip(writers, (plain.train, plain.test), strict=True):
        if len(ids) != len(examples[1]):
            raise ValueError(f"{path} has writers of {len(ids):,} images, but MNIST here has {len(examples[1]):,}")
    every, numbered = np.unique(np.concatenate(writers), return_inverse=True)
    cut = len(plain.train[1])
    return Dataset(
        "mnist-writers",
        plain.train,
        plain.test,
        plain.class_names,
        norm="mnist",
        train_ids=numbered[:cut].astype(np.int64),
        test_ids=numbered[cut:].astype(np.int64),
        owners=tuple(f"writer {number}" for number in every),
    )


def _writers(folder: Path) -> tuple[tuple[Labels, Labels], Path]:
    """Read the writer of each image, from an npz file with two arrays or from QMNIST's labels."""
    npz = folder / "mnist_writers.npz"
    if npz.exists():
        try:
            with np.load(npz, allow_pickle=False) as arrays:
                return (arrays["writer_train"].astype(np.int64), arrays["writer_test"].astype(np.int64)), npz
        except Exception as error:  # errors of zip, header, pickle or key
            raise ValueError(f"{npz} is damaged: expected arrays writer_train and writer_test, but {error}") from error
    found: list[Labels] = []
    path = npz
    roots = [folder, folder / "QMNIST" / "raw", folder / "MNIST" / "raw"]
    for part in ("train", "test"):
        names = [f"qmnist-{part}-labels{dot}idx2-int{packed}" for dot in ".-" for packed in ("", ".gz")]
        there = first(root / name for root in roots for name in names)
        if there is None:
            raise missing("mnist-writers", folder, [npz, *(root / names[1] for root in roots)])
        path = there
        table = read_idx(path, 2, ">i4")
        if table.shape[1] < 3:
            raise ValueError(f"{path} is damaged: expected 8 columns per digit, got {table.shape[1]}")
        # The third column is the writer. Only the first 10,000 test digits of QMNIST are in MNIST.
        found.append(table[: None if part == "train" else 10_000, 2].astype(np.int64))
    return (found[0], found[1]), path


def _idx(name: str, folder: Path, places: list[Path], classes: tuple[str, ...], partial: bool) -> Dataset:
    paths = next((found for place in places if (found := _all_four(place))), None)
    if paths is None:
        raise missing(name, folder, places)
    files = paths

    def build(draft: Draft) -> None:
        for part, images_path, labels_path in (("train", files[0], files[1]), ("test", files[2], files[3])):
            images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
            if len(images) != len(labels):
                raise ValueError(f"{labels_path} is damaged: expected {len(images):,} labels, got {len(labels):,}")
            check_labels(labels_path, labels, len(classes))
            draft.put(f"{part}_x", images[:, None])
            draft.put(f"{part}_y", labels.astype(np.int64))

    arrays, _ = cached(folder, name, files, {}, build)
    check_whole(name, folder, sizes(arrays, 60_000, 10_000), partial)
    return Dataset(name, pair(arrays, "train"), pair(arrays, "test"), classes, norm=name)


def pair(arrays: dict[str, Array], part: str) -> tuple[Array, Labels]:
    """Return inputs and targets of a part (train or test) of cached arrays."""
    return arrays[f"{part}_x"], arrays[f"{part}_y"]


def sizes(arrays: dict[str, Array], train: int, test: int) -> dict[str, tuple[int, int]]:
    """Return how many examples cached arrays have, beside how many they should have."""
    return {
        "training examples": (len(arrays["train_y"]), train),
        "test examples": (len(arrays["test_y"]), test),
    }


def _all_four(place: Path) -> list[Path] | None:
    """Return the four files in a folder, compressed or not, with a dot or a dash before the format; else `None`."""
    found = []
    for name in FILES:
        form = "idx3-ubyte" if name.endswith("images") else "idx1-ubyte"
        path = first(place / f"{name}{dot}{form}{packed}" for packed in ("", ".gz") for dot in "-.")
        if path is None:
            return None
        found.append(path)
    return found
