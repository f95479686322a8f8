"""Data sets of the Hugging Face hub: with a stand-in for the package `datasets`, and with the package on local files."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from fedfactor.data import MissingData, load
from tests.helpers import made_data as make

Kinds = Mapping[str, Any]
"""Types of columns by name: `text`, `image`, or the names of classes."""
Splits = Mapping[str, Mapping[str, list[Any]]]
Publish = Callable[[Kinds, Splits], str]
"""Makes a data set available and returns its name."""


class Image:
    """Stands for a feature of the package `datasets`."""


class ClassLabel:
    """Stands for a feature of the package `datasets`."""

    def __init__(self, names: list[str]) -> None:
        self.names = names


class Rows:
    """Stands for datasets.Dataset."""

    def __init__(self, kinds: Kinds, columns: Mapping[str, list[Any]]) -> None:
        features = {"text": object(), "image": Image()}
        self.features = {
            name: ClassLabel(kind) if isinstance(kind, list) else features[kind] for name, kind in kinds.items()
        }
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else {name: c[key] for name, c in self.columns.items()}


def stand_in(monkeypatch: pytest.MonkeyPatch, kinds: Kinds, splits: Splits) -> str:
    """Put a module in place of `datasets` that knows one data set."""

    def load_dataset(name: str, config: str | None, split: str, revision: str) -> Rows:
        if name != "owner/set" or split not in splits:
            raise ConnectionError("couldn't reach\nthe hub")
        return Rows(kinds, splits[split])

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return "owner/set"


def local_files(folder: Path, kinds: Kinds, splits: Splits) -> str:
    """Write a data set as Parquet files, which the package loads by the name of their folder."""
    import datasets

    features = {"text": datasets.Value("string"), "image": datasets.Image()}
    chosen = datasets.Features(
        {
            name: datasets.ClassLabel(names=kind) if isinstance(kind, list) else features[kind]
            for name, kind in kinds.items()
        }
    )
    folder.mkdir()
    for split, columns in splits.items():
        datasets.Dataset.from_dict(dict(columns), features=chosen).to_parquet(folder / f"{split}.parquet")
    return str(folder)


@pytest.fixture(params=["stand-in", pytest.param("datasets", marks=pytest.mark.huggingface)])
def publish(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    if request.param == "stand-in":
        return lambda kinds, splits: stand_in(monkeypatch, kinds, splits)
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return lambda kinds, splits: local_files(tmp_path / "published", kinds, splits)


TEXTS = {
    "train": {"text": ["Meow meow", "woof"], "label": [0, 1], "who": ["ann", "bob"]},
    "test": {"text": ["meow moo"], "label": [0], "who": ["bob"]},
}


def test_texts(publish: Publish, tmp_path: Path) -> None:
    name = publish({"text": "text", "label": ["cat", "dog"], "who": "text"}, TEXTS)
    data = load(f"huggingface:{name}", tmp_path, length=3, natural="who")
    assert data.class_names == ("cat", "dog")
    np.testing.assert_array_equal(data.train[0], [[2, 2, 0], [3, 0, 0]])
    np.testing.assert_array_equal(data.train[1], [0, 1])
    np.testing.assert_array_equal(data.test[0], [[2, 1, 0]])
    assert data.test_ids is not None and data.test_ids.tolist() == [1]
    assert data.owners == ("ann", "bob")
    with pytest.raises(ValueError, match="the column of the inputs is unknown; set it to one of text, label, who"):
        load(f"huggingface:{name}", tmp_path, inputs="txt")


def test_images(publish: Publish, tmp_path: Path) -> None:
    arrays = [make.pixels(5, 4, 3, seed=seed) for seed in range(3)]
    columns = {"img": [PIL.Image.fromarray(array) for array in arrays], "what": ["b", "a", "b"]}
    name = publish({"img": "image", "what": "text"}, {"train": columns})
    data = load(f"huggingface:{name}", tmp_path, test="", target="what")
    np.testing.assert_array_equal(data.train[0], np.stack(arrays).transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(data.train[1], [1, 0, 1])
    assert data.class_names == ("a", "b") and data.test[0].shape == (0, 3, 5, 4)


def test_what_cannot_be_loaded_says_where_it_was_looked_for(publish: Publish, tmp_path: Path) -> None:
    name = publish({"text": "text", "label": ["cat", "dog"], "who": "text"}, TEXTS)
    for wrong in ({"name": f"huggingface:{name}-other"}, {"name": f"huggingface:{name}", "test": "validation"}):
        with pytest.raises(MissingData, match=r"not be loaded .* hub .*: [^\n]+; download it once"):
            load(data_dir=tmp_path, **wrong)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = r"huggingface:owner/set needs datasets: pip install .*\[huggingface\]'"
    with pytest.raises(ImportError, match=message):
        load("huggingface:owner/set", tmp_path)
