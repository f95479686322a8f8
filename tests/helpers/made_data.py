"""Tiny files in the formats that data sets are distributed in."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np


def idx(path: Path, array: np.ndarray[Any, Any]) -> None:
    code = {"uint8": 0x08, "int32": 0x0C}[str(array.dtype)]
    head = bytes([0, 0, code, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    data = head + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def pixels(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def mnist(place: Path, train: int = 20, test: int = 10, end: str = ".gz") -> dict[str, np.ndarray[Any, Any]]:
    made = {
        "train-images-idx3-ubyte": pixels(train, 28, 28, seed=1),
        "train-labels-idx1-ubyte": np.arange(train, dtype=np.uint8) % 10,
        "t10k-images-idx3-ubyte": pixels(test, 28, 28, seed=2),
        "t10k-labels-idx1-ubyte": np.arange(test, dtype=np.uint8)[::-1] % 10,
    }
    for name, array in made.items():
        idx(place / (name + end), array)
    return made


def cifar10(folder: Path, each: int = 4) -> list[np.ndarray[Any, Any]]:
    place = folder / "cifar-10-batches-bin"
    place.mkdir(parents=True)
    made = []
    for number, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
        rows = pixels(each, 3073, seed=number)
        rows[:, 0] %= 10
        rows.tofile(place / name)
        made.append(rows)
    (place / "batches.meta.txt").write_text("\n".join(f"class{i}" for i in range(10)) + "\n\n")
    return made


def cifar100(folder: Path, classes: int = 100) -> dict[str, np.ndarray[Any, Any]]:
    place = folder / "cifar-100-binary"
    place.mkdir(parents=True)
    made = {}
    for name, count in (("train", 6), ("test", 3)):
        rows = pixels(count, 3074, seed=count)
        rows[:, 0] %= 20
        rows[:, 1] %= classes
        rows.tofile(place / f"{name}.bin")
        made[name] = rows
    (place / "fine_label_names.txt").write_text("\n".join(f"fine{i}" for i in range(100)) + "\n")
    return made


def image(path: Path, array: np.ndarray[Any, Any]) -> None:
    """Write an image, channels first."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0)).save(path)


def femnist(path: Path, users: dict[str, list[int]], seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = {user: pixels(len(labels), 784, seed=seed) for user, labels in users.items()}
    data = {
        "users": list(users),
        "num_samples": [len(labels) for labels in users.values()],
        "user_data": {user: {"x": (images[user] / 255).tolist(), "y": labels} for user, labels in users.items()},
    }
    path.write_text(json.dumps(data))
    return images


def cinic10(folder: Path) -> None:
    """Two training images and one test image of every class."""
    for part, count in (("train", 2), ("test", 1)):
        for label in range(10):
            for number in range(count):
                path = folder / "CINIC-10" / part / f"class{label}" / f"{number}.png"
                image(path, pixels(3, 32, 32, seed=10 * label + number))


def tiny_imagenet(folder: Path) -> None:
    """Three training images and one validation image of each of three classes."""
    place = folder / "tiny-imagenet-200"
    names = [f"n{label:08}" for label in range(3)]
    for label, name in enumerate(names):
        for number in range(3):
            path = place / "train" / name / "images" / f"{name}_{number}.png"
            image(path, pixels(3, 64, 64, seed=10 * label + number))
        image(place / "val" / "images" / f"val_{label}.png", pixels(3, 64, 64, seed=100 + label))
    (place / "val" / "val_annotations.txt").write_text(
        "".join(f"val_{label}.png\t{name}\t0\t0\t63\t63\n" for label, name in enumerate(names))
    )
    (place / "wnids.txt").write_text("\n".join(names) + "\n")


def imdb(folder: Path) -> None:
    """Two reviews of random words of each kind, for training and for testing."""
    for number, inside in enumerate(("train/neg", "train/pos", "test/neg", "test/pos")):
        place = folder / "aclImdb" / inside
        place.mkdir(parents=True)
        for review in range(2):
            drawn = np.random.default_rng(10 * number + review).choice(list("abcdefgh"), 20)
            (place / f"{review}_7.txt").write_text(" ".join(drawn))


def ag_news(folder: Path) -> None:
    """Texts of random words, four of each kind for training and two for testing."""
    place = folder / "ag_news_csv"
    place.mkdir(parents=True)
    for part, count in (("train", 4), ("test", 2)):
        rng = np.random.default_rng(count)
        rows = [f'"{kind}","{" ".join(rng.choice(list("abcdefgh"), 9))}",""' for kind in (1, 2, 3, 4) * count]
        (place / f"{part}.csv").write_text("\n".join(rows) + "\n")


def shakespeare(folder: Path, roles: int = 3, letters: int = 600) -> None:
    """A few roles that say random letters."""
    place = folder / "shakespeare" / "by_play_and_character"
    place.mkdir(parents=True)
    for role in range(roles):
        drawn = np.random.default_rng(role).choice(list("abcdefgh ,.\n"), letters)
        (place / f"ROLE_{role}.txt").write_text("".join(drawn).strip() + "\n")
