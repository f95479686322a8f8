"""Data sets by name: missing data, options out of range, and functions of the user's own."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfactor import registry
from fedfactor.data import Dataset, MissingData, load
from fedfactor.data.clients import AsStored
from fedfactor.data.sources import data_folder, info, names
from tests.helpers import made_data as make


def test_all_sources_say_what_they_are() -> None:
    expected = {
        "ag_news", "cifar10", "cifar100", "cinic10", "digits", "fashion-mnist", "femnist", "folder", "huggingface",
        "imdb", "mnist", "mnist-writers", "shakespeare", "tiny-imagenet",
    }  # fmt: skip
    assert expected <= set(names())
    for name in names():
        assert info(name).summary, name


@pytest.mark.parametrize("name", sorted(set(names()) - {"digits", "folder", "huggingface"}))
def test_missing_data_is_one_sentence(name: str, tmp_path: Path) -> None:
    if name == "mnist-writers":
        make.mnist(tmp_path)
    with pytest.raises(MissingData) as caught:
        load(name, tmp_path, **({"partial": True} if "partial" in info(name).options else {}))
    text = str(caught.value)
    assert text.startswith(f"{name} was looked for in {tmp_path}")
    assert "fetch it with `" in text
    assert "{" not in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "options", "missing"),
    [
        ("ag_news", {}, "16 of 120,000 training examples, 8 of 7,600 test examples"),
        ("cifar100", {}, "6 of 50,000 images in train.bin, 3 of 10,000 images in test.bin"),
        ("cinic10", {}, "20 of 90,000 images in train, 10 of 90,000 images in test"),
        ("fashion-mnist", {}, "20 of 60,000 training examples, 10 of 10,000 test examples"),
        ("imdb", {}, "4 of 25,000 training examples, 4 of 25,000 test examples"),
        ("imdb", {"pool": True, "pool_train": 6}, "2 of 49,994 test examples"),
        ("mnist", {}, "20 of 60,000 training examples, 10 of 10,000 test examples"),
        ("mnist-writers", {}, "20 of 60,000 training examples, 10 of 10,000 test examples"),
        ("shakespeare", {}, "3 of 1,129 roles, 1,508 of 4,226,158 windows"),
        ("tiny-imagenet", {}, "3 of 200 classes, 9 of 100,000 training images, 3 of 10,000 validation images"),
    ],
)
def test_a_part_of_a_data_set_is_only_taken_if_that_is_asked_for(
    name: str, options: dict[str, Any], missing: str, tmp_path: Path
) -> None:
    places = {"mnist": tmp_path / "MNIST" / "raw", "fashion-mnist": tmp_path / "FashionMNIST" / "raw"}
    made = name.removesuffix("-writers")
    make_it = {"fashion-mnist": make.mnist}.get(made) or getattr(make, made.replace("-", "_"))
    make_it(places.get(made, tmp_path))
    np.savez(tmp_path / "mnist_writers.npz", writer_train=np.arange(20), writer_test=np.arange(10))
    with pytest.raises(
        ValueError, match=re.escape(f"{made} in {tmp_path} is incomplete: it has {missing}; ")
    ) as caught:
        load(name, tmp_path, **options)
    assert f"`{info(made).fetch.format(data=tmp_path)}`" in str(caught.value)
    load(name, tmp_path, partial=True, **options)


def test_mistakes_name_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data set is called 'fashion_mnist'; did you mean 'fashion-mnist'"):
        load("fashion_mnist", tmp_path)
    with pytest.raises(ValueError, match="imdb has no option 'lenght'; did you mean 'length'"):
        load("imdb", tmp_path, partial=True, lenght=3)
    with pytest.raises(ValueError, match="huggingface needs a name after a colon"):
        load("huggingface", tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", {"test_share": 1.0}, "test_share must lie between 0 and 1, got 1"),
        ("digits", {"test_share": -0.5}, "test_share must lie between 0 and 1, got -0.5"),
        ("digits", {"norm": "cifar10"}, "the normalisation 'cifar10' has 3 channels, the images have 1"),
        ("imdb", {"length": 0}, "length must be a whole number, at least 1, got 0"),
        ("ag_news", {"vocabulary": -1}, "vocabulary must be a whole number, at least 1, got -1"),
        ("shakespeare", {"roles": -1}, "roles must be a whole number, at least 0, got -1"),
        ("folder", {"path": ".", "size": -3}, "size must be a whole number, at least 0, got -3"),
        ("folder", {"path": "."}, "folder has no training examples: its files in .* are empty, or have another layout"),
    ],
)
def test_options_out_of_range(name: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    with pytest.raises(ValueError, match=message):
        load(name, tmp_path, **options)


def test_where_data_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDFACTOR_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "fedfactor" / "data"
    monkeypatch.setenv("FEDFACTOR_DATA", str(tmp_path / "mine"))
    assert data_folder() == tmp_path / "mine"
    assert data_folder("here") == Path("here")


def test_the_recipe_can_choose_normalisation_and_augmentation(tmp_path: Path) -> None:
    make.cifar10(tmp_path)
    data = load("cifar10", tmp_path, partial=True, norm="flanc", crop=4, flip=True)
    assert (data.transform.crop, data.transform.flip) == (4, True)  # type: ignore[union-attr]
    assert load("cifar10", tmp_path, partial=True, norm="").norm == "cifar10"
    with pytest.raises(ValueError, match="no normalisation is called 'flank'; there are"):
        load("cifar10", tmp_path, partial=True, norm="flank")


def test_text_is_not_augmented(tmp_path: Path) -> None:
    place = tmp_path / "ag_news_csv"
    place.mkdir()
    for part in ("train", "test"):
        (place / f"{part}.csv").write_text('"1","a","b"\n')
    with pytest.raises(ValueError, match="ag_news has no images of uint8"):
        load("ag_news", tmp_path, partial=True, crop=4)


def tiny(folder: Path, size: int = 3) -> Dataset:
    """Ones."""
    examples = np.ones((size, 1, 2, 2), np.uint8), np.zeros(size, np.int64)
    return Dataset("tiny", examples, examples, ("zero",))


def test_users_add_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._table, "data", dict(registry._table["data"]))
    registry.register("data", "tiny")(tiny)
    assert len(load("tiny", tmp_path, size=5).train[1]) == 5
    with pytest.raises(ValueError, match="'tiny' is already registered by"):
        registry.register("data", "tiny")(lambda folder: tiny(folder))


def test_packages_add_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._table, "data", dict(registry._table["data"]))
    point = EntryPoint("plugged", "tests.data.sources.test_registry:tiny", "fedfactor.data")
    monkeypatch.setattr(registry, "_plugins", lambda kind: (point,))
    assert "plugged" in names()
    assert load("plugged", tmp_path).name == "tiny"


# A function of the user's own.


def table(rows: int, wide: int = 5) -> Dataset:
    """Numbers, and whether the first is above 0."""
    x = np.random.default_rng(0).normal(size=(rows, wide))
    y = (x[:, 0] > 0).astype(np.int64)
    return Dataset("table", (x[10:], y[10:]), (x[:10], y[:10]), ("no", "yes"))


def from_folder(folder: Path) -> Dataset:
    """Ones, as many as a file says."""
    return tiny(folder, int((folder / "size").read_text()))


def a_word(folder: Path) -> str:
    return "digits"


HERE = "tests.data.sources.test_registry"


def test_data_of_a_function(tmp_path: Path) -> None:
    found = load(f"{HERE}:table", tmp_path, rows=30)
    assert found.train[0].shape == (20, 5) and found.classes == 2
    assert found.transform == AsStored()  # floats are not token ids
    (tmp_path / "size").write_text("4")
    assert len(load(f"{HERE}:from_folder", tmp_path).train[1]) == 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("table", {}, "table needs rows, which has no default"),
        ("table", {"rows": 30, "wid": 3}, "has no option 'wid'; did you mean 'wide'"),
        ("table", {"rows": 30, "crop": 4}, "table has no images of uint8: it cannot be normalised"),
        ("a_word", {}, r"should return a fedfactor\.data\.Dataset or Datasets, .* got a str"),
        ("nothing", {}, "cannot be imported as package.module:name: .*has no attribute 'nothing'.*there are ag_news"),
    ],
)
def test_mistakes_with_functions(name: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(f"{HERE}:{name}", tmp_path, **options)


def test_a_module_that_is_not_there_may_be_a_slip(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'huggingfac:x', and .*No module named .*did you mean 'huggingface'"):
        load("huggingfac:x", tmp_path)
