"""Folders of images with one sub-folder per class: your own, Tiny-ImageNet, CINIC-10."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedfactor.data.dataset import Array, Dataset
from fedfactor.data.sources.cache import Draft, cached
from fedfactor.data.sources.files import first, read_lines
from fedfactor.data.sources.mnist import pair
from fedfactor.data.sources.registry import check_whole, missing
from fedfactor.registry import register
from fedfactor.support.checks import check_number
from fedfactor.support.install import optional

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".webp", ".tif", ".tiff"}

Listed = list[tuple[Path, int]]
"""Files and their labels."""


@register("data", "folder")
def folder(folder: Path, path: str = "", size: int = 0, channels: int = 3) -> Dataset:
    """Any folder of images: train/ and test/ (or val/, valid/) with one sub-folder per class, or only the sub-folders.

    `path` is the folder, relative to the data folder. `size` resizes all images to squares of that side.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, got {channels}")
    if not path:
        raise ValueError("folder needs a path: the folder that holds the images")
    place = folder / Path(path).expanduser()
    if not place.is_dir():
        raise missing("folder", folder, [place])
    train = first([place / "train"]) or place
    test = None if train == place else first([place / "test", place / "val", place / "valid"])
    classes = _class_folders(train)
    if not classes:
        raise ValueError(f"{train} has no images: expected one sub-folder of images per class")
    files = {"train": _listed(train, classes), "test": _listed(test, classes) if test else []}
    return _dataset("folder", folder, files, classes, size=size, channels=channels, label=place.name)


@register(
    "data",
    "tiny-imagenet",
    fetch="mkdir -p {data} && cd {data} && curl -LO http://cs231n.stanford.edu/tiny-imagenet-200.zip && "
    "unzip -q tiny-imagenet-200.zip",
)
def tiny_imagenet(folder: Path, size: int = 0, partial: bool = False) -> Dataset:
    """Tiny-ImageNet: 64 x 64 colour images of 200 classes, 100,000 for training and 10,000 (validation) for testing.

    `partial` accepts fewer classes or images.
    """
    places = [folder / "tiny-imagenet-200", folder / "tiny-imagenet"]
    place = first(places)
    if place is None:
        raise missing("tiny-imagenet", folder, places)
    notes = place / "val" / "val_annotations.txt"
    for path in (place / "wnids.txt", place / "train", notes):
        if not path.exists():
            raise ValueError(f"{place} is incomplete: expected {path.relative_to(place)}")
    classes = sorted(name for name in read_lines(place / "wnids.txt") if (place / "train" / name).is_dir())
    train = [
        (path, label)
        for label, name in enumerate(classes)
        for path in _images(place / "train" / name / "images", place / "train" / name)
    ]
    label_of = {name: label for label, name in enumerate(classes)}
    test: Listed = []
    for line in read_lines(notes):
        file, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if not wnid:
            raise ValueError(f"{notes} is damaged: expected a file, a tab and a class in each line, got {line!r}")
        if wnid in label_of:
            test.append((place / "val" / "images" / file, label_of[wnid]))
    found = {"classes": (len(classes), 200), "training images": (len(train), 100_000)}
    check_whole("tiny-imagenet", folder, {**found, "validation images": (len(test), 10_000)}, partial)
    named = _words(place, classes)
    files = {"train": train, "test": test}
    return _dataset("tiny-imagenet", folder, files, classes, size=size, names=named, norm="tiny-imagenet", also=[notes])


@register(
    "data",
    "cinic10",
    fetch="mkdir -p {data}/CINIC-10 && curl -L "
    "https://datashare.is.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz | tar -xz -C {data}/CINIC-10",
)
def cinic10(folder: Path, with_valid: bool = False, partial: bool = False) -> Dataset:
    """CINIC-10: 32 x 32 colour images of 10 classes, 90,000 each in train, valid and test.

    `with_valid` adds its validation set to the training set. `partial` accepts fewer images than there should be.
    """
    places = [folder / "CINIC-10", folder / "cinic-10", folder / "cinic10"]
    place = first(places)
    if place is None:
        raise missing("cinic10", folder, places)
    parts = ("train", "valid", "test") if with_valid else ("train", "test")
    for part in parts:
        if not (place / part).is_dir():
            raise ValueError(f"{place} is incomplete: expected a folder {part}")
    classes = _class_folders(place / "train")
    listed = {part: _listed(place / part, classes) for part in parts}
    check_whole(
        "cinic10", folder, {f"images in {part}": (len(found), 90_000) for part, found in listed.items()}, partial
    )
    train = [entry for part in parts[:-1] for entry in listed[part]]
    files = {"train": train, "test": listed["test"]}
    return _dataset("cinic10", folder, files, classes, norm="cinic10")


def _dataset(
    name: str,
    root: Path,
    files: dict[str, Listed],
    classes: list[str],
    *,
    size: int = 0,
    channels: int = 3,
    names: list[str] | None = None,
    norm: str = "imagenet",
    label: str = "",
    also: Sequence[Path] = (),
) -> Dataset:
    """Return the data set, after decoding all files into cached arrays."""
    check_number("size", size, 0, whole=True)

    def build(draft: Draft) -> None:
        side: tuple[int, int] | None = (size, size) if size else None
        for part, listed in files.items():
            if side is None and listed:
                side = _decode(listed[0][0], None, channels).shape[1:]
            array = draft.empty(f"{part}_x", (len(listed), channels, *(side or (0, 0))), "uint8")
            for row, (path, _) in enumerate(listed):
                array[row] = _decode(path, side, channels, resize=bool(size))
            draft.put(f"{part}_y", np.array([label for _, label in listed], np.int64))

    # The time of a folder changes when a file is added or removed. Reading the time of each file would be far slower.
    inside = sorted({path.parent for listed in files.values() for path, _ in listed})
    options = {"size": size, "channels": channels, "counts": [len(listed) for listed in files.values()]}
    arrays, _ = cached(root, f"{name}-{label}" if label else name, [*inside, *also], options, build)
    norm = "half" if channels == 1 else norm
    return Dataset(name, pair(arrays, "train"), pair(arrays, "test"), tuple(names or classes), norm=norm)


def _decode(path: Path, side: tuple[int, int] | None, channels: int, *, resize: bool = False) -> Array:
    """Decode an image to uint8, channels first."""
    pillow: Any = optional("PIL.Image", "images", f"reading images such as {path.name}")
    try:
        with pillow.open(path) as image:
            picture = image.convert("RGB" if channels == 3 else "L")
            if resize and side is not None:
                picture = picture.resize((side[1], side[0]), pillow.Resampling.BILINEAR)
            pixels = np.asarray(picture)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: expected an image") from None
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise ValueError(f"{path} is damaged: expected an image, but {error}") from error
    if side is not None and pixels.shape[:2] != side:
        found = " x ".join(map(str, pixels.shape[:2]))
        raise ValueError(f"{path} is {found}, expected {side[0]} x {side[1]} like the others; set size to resize all")
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _class_folders(place: Path) -> list[str]:
    return sorted(entry.name for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _listed(place: Path, classes: list[str]) -> Listed:
    extra = set(_class_folders(place)) - set(classes)
    if extra:
        raise ValueError(f"{place} has classes that the training folder lacks: {', '.join(sorted(extra))}")
    return [(path, label) for label, name in enumerate(classes) for path in _images(place / name)]


def _images(*places: Path) -> list[Path]:
    """Return the images in the first folder that exists."""
    place = first(places)
    return sorted(path for path in place.iterdir() if path.suffix.lower() in SUFFIXES) if place is not None else []


def _words(place: Path, classes: list[str]) -> list[str]:
    """Return the names of the classes from words.txt, if that file exists."""
    path = place / "words.txt"
    words = dict(line.split("\t", 1) for line in read_lines(path) if "\t" in line) if path.exists() else {}
    return [words.get(name, name).partition(",")[0] for name in classes]
