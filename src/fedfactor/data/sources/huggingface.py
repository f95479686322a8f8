"""Data sets of the Hugging Face hub by name; needs a network and the package `datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedfactor.data.dataset import Array, Dataset
from fedfactor.data.sources.cache import Draft, cached
from fedfactor.data.sources.mnist import pair
from fedfactor.data.sources.registry import MissingData
from fedfactor.data.sources.text import numbered, tokenized, tokenizer_files
from fedfactor.registry import register
from fedfactor.support.install import optional

PARTS = ("train", "test")


@register("data", "huggingface", prefix=True)
def huggingface(
    folder: Path,
    name: str,
    config: str = "",
    revision: str = "main",
    train: str = "train",
    test: str = "test",
    inputs: str = "",
    target: str = "",
    natural: str = "",
    size: int = 0,
    vocabulary: int = 10_000,
    length: int = 128,
    tokenizer: str = "",
) -> Dataset:
    """Any data set of images or texts with classes on the Hugging Face hub: huggingface:NAME.

    `train` and `test` are names of splits (`test = ""`: no test set). `inputs` and `target` are columns, by default
    found by their types; `natural` is the column of the natural owner. `size` resizes images to squares of that side.
    `tokenizer` is the folder of a Hugging Face tokenizer, which replaces the most frequent words.
    """

    def build(draft: Draft) -> None:
        # Imported only here: cached arrays need neither the package nor a network.
        hub = optional("datasets", "huggingface", f"the data set huggingface:{name}")
        splits = {
            part: _split(hub, name, config, revision, split) for part, split in (("train", train), ("test", test))
        }
        first = splits["train"]
        if first is None:
            raise ValueError(f"huggingface:{name} needs the name of its training split")
        x, y = _columns(name, first, inputs, target)
        draft.facts["classes"] = _classes(first, y)
        if _is_image(first, x):
            _put_images(draft, name, splits, x, size)
        else:
            texts = {part: [str(text) for text in rows[x]] if rows else [] for part, rows in splits.items()}
            encoded, draft.facts["vocabulary"] = (
                tokenized(texts, tokenizer, length) if tokenizer else numbered(texts, vocabulary, length)
            )
            for part in PARTS:
                draft.put(f"{part}_x", encoded[part])
        _put_labels(draft, splits, y, natural)

    key = [name, config, revision, train, test, inputs, target, natural, size, vocabulary, length]
    arrays, facts = cached(folder, f"huggingface-{name.replace('/', '-')}", tokenizer_files(tokenizer), key, build)
    return Dataset(
        f"huggingface:{name}",
        pair(arrays, "train"),
        pair(arrays, "test"),
        tuple(facts["classes"]),
        norm="half" if arrays["train_x"].ndim == 4 else "none",
        vocabulary=tuple(facts.get("vocabulary", ())),
        train_ids=arrays.get("train_ids"),
        test_ids=arrays.get("test_ids"),
        owners=tuple(facts.get("owners", ())),
    )


def _split(hub: Any, name: str, config: str, revision: str, split: str) -> Any:
    if not split:
        return None
    try:
        return hub.load_dataset(name, config or None, split=split, revision=revision)
    except Exception as error:  # no network, no such name, no such split, a gated repository, ...
        reason = " ".join(str(error).split())
        raise MissingData(
            f"huggingface:{name} ({split}) could not be loaded from the Hugging Face hub or its local cache: "
            f"{reason or type(error).__name__}; download it once with `hf download --repo-type dataset {name}`"
        ) from error


def _columns(name: str, rows: Any, inputs: str, target: str) -> tuple[str, str]:
    """Return the columns of inputs and classes. Raise ValueError if they are neither given nor found."""
    features = rows.features
    kind = {column: type(feature).__name__ for column, feature in features.items()}
    found = (
        inputs or next((c for c in kind if kind[c] == "Image"), None) or next((c for c in kind if c == "text"), None)
    )
    labels = target or next((c for c in kind if kind[c] == "ClassLabel"), None)
    for column, option in ((found, "inputs"), (labels, "target")):
        if column is None or column not in features:
            raise ValueError(
                f"huggingface:{name}: the column of the {option} is unknown; set it to one of {', '.join(features)}"
            )
    return str(found), str(labels)


def _is_image(rows: Any, column: str) -> bool:
    return type(rows.features[column]).__name__ == "Image"


def _classes(rows: Any, column: str) -> list[str]:
    names = getattr(rows.features[column], "names", None)
    if names is not None:
        return [str(name) for name in names]
    return [str(value) for value in sorted(set(rows[column]))]


def _put_images(draft: Draft, name: str, splits: dict[str, Any], column: str, size: int) -> None:
    shape: tuple[int, ...] | None = None
    for part, rows in splits.items():
        count = len(rows) if rows else 0
        array: Array | None = None
        for row in range(count):
            pixels = _pixels(rows[row][column], size, None if shape is None else shape[0])
            shape = shape or pixels.shape
            if pixels.shape != shape:
                raise ValueError(f"huggingface:{name}: images differ in size ({pixels.shape}, {shape}); give a size")
            if array is None:
                array = draft.empty(f"{part}_x", (count, *shape), "uint8")
            array[row] = pixels
        if array is None:
            draft.put(f"{part}_x", np.empty((0, *(shape or (3, 0, 0))), np.uint8))


def _pixels(image: Any, size: int, channels: int | None) -> Array:
    """Convert a Pillow image to uint8, channels first; all images get the number of channels of the first."""
    grey = image.mode in ("1", "L", "I;16", "LA") if channels is None else channels == 1
    picture = image.convert("L" if grey else "RGB")
    if size:
        picture = picture.resize((size, size))
    pixels = np.asarray(picture)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def _put_labels(draft: Draft, splits: dict[str, Any], column: str, natural: str) -> None:
    classes: list[str] = draft.facts["classes"]
    number = {name: index for index, name in enumerate(classes)}
    owners: dict[str, int] = {}
    for part, rows in splits.items():
        values = list(rows[column]) if rows else []
        if rows and getattr(rows.features[column], "names", None) is None:
            unknown = {str(value) for value in values} - set(number)
            if unknown:
                raise ValueError(f"the {part} split has classes that the training split lacks: {', '.join(unknown)}")
            values = [number[str(value)] for value in values]
        draft.put(f"{part}_y", np.array(values, np.int64))
        if natural:
            ids = [owners.setdefault(str(owner), len(owners)) for owner in rows[natural]] if rows else []
            draft.put(f"{part}_ids", np.array(ids, np.int64))
    if natural:
        draft.facts["owners"] = list(owners)
