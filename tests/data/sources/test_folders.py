"""Folders of images, one per class."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfactor.data import MissingData, load
from tests.helpers import made_data as make


def test_any_folder_of_images(tmp_path: Path) -> None:
    made: dict[tuple[str, str, int], np.ndarray[Any, Any]] = {}
    for part, count in (("train", 3), ("val", 2)):
        for label in ("cat", "dog"):
            for number in range(count):
                array = make.pixels(3, 6, 5, seed=len(made))
                make.image(tmp_path / "pets" / part / label / f"{number}.png", array)
                made[part, label, number] = array
    (tmp_path / "pets" / "train" / "cat" / "notes.txt").write_text("no image")
    data = load("folder", tmp_path, path="pets")
    assert data.class_names == ("cat", "dog")
    np.testing.assert_array_equal(data.train[1], [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(data.train[0][4], made["train", "dog", 1])
    np.testing.assert_array_equal(data.test[0][1], made["val", "cat", 1])
    assert load("folder", tmp_path, path="pets", size=4, channels=1).train[0].shape == (6, 1, 4, 4)
    alone = load("folder", tmp_path, path=str(tmp_path / "pets" / "train"))
    assert len(alone.train[1]) == 6
    assert len(alone.test[1]) == 0


def test_folder_mistakes(tmp_path: Path) -> None:
    for name, side in (("a/1.png", 6), ("b/1.png", 6), ("b/2.png", 7)):
        make.image(tmp_path / "odd" / name, make.pixels(3, side, side))
    with pytest.raises(ValueError, match=r"2\.png is 7 x 7, expected 6 x 6 like the others; set size to resize"):
        load("folder", tmp_path, path="odd")
    broken = tmp_path / "odd" / "b" / "2.png"
    broken.write_bytes((tmp_path / "odd" / "b" / "1.png").read_bytes()[:60])
    with pytest.raises(ValueError, match=r"2\.png is damaged: expected an image"):
        load("folder", tmp_path, path="odd")
    with pytest.raises(ValueError, match="folder needs a path"):
        load("folder", tmp_path)
    with pytest.raises(MissingData, match=r"folder was looked for in .*nowhere"):
        load("folder", tmp_path, path="nowhere")
    make.image(tmp_path / "more" / "train" / "a" / "1.png", make.pixels(3, 6, 6))
    make.image(tmp_path / "more" / "test" / "z" / "1.png", make.pixels(3, 6, 6))
    with pytest.raises(ValueError, match="has classes that the training folder lacks: z"):
        load("folder", tmp_path, path="more")


def test_images_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    (tmp_path / "pets" / "cat" / "1.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"reading images such as 1\.png needs PIL: pip install .*\[images\]'"):
        load("folder", tmp_path, path="pets")


def test_tiny_imagenet(tmp_path: Path) -> None:
    place = tmp_path / "tiny-imagenet-200"
    grey = make.pixels(1, 64, 64, seed=3)
    for number, wnid in enumerate(("n02", "n01")):
        make.image(place / "train" / wnid / "images" / f"{wnid}_0.png", make.pixels(3, 64, 64, seed=number))
    make.image(place / "train" / "n01" / "images" / "n01_1.png", grey)
    make.image(place / "val" / "images" / "val_0.png", make.pixels(3, 64, 64, seed=9))
    (place / "val" / "val_annotations.txt").write_text("val_0.png\tn02\t0\t0\t63\t63\n")
    (place / "wnids.txt").write_text("n02\nn01\nn99\n")
    (place / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\tcentipede\n")
    data = load("tiny-imagenet", tmp_path, partial=True)
    assert data.class_names == ("goldfish", "centipede")
    np.testing.assert_array_equal(data.train[1], [0, 0, 1])
    np.testing.assert_array_equal(data.train[0][1], np.repeat(grey, 3, 0))
    np.testing.assert_array_equal(data.train[0][2], make.pixels(3, 64, 64, seed=0))
    np.testing.assert_array_equal(data.test[1], [1])
    (place / "val" / "val_annotations.txt").write_text("val_1.png\tn02\t0\t0\t63\t63\n")
    with pytest.raises(ValueError, match=r"val_1\.png is missing: expected an image"):
        load("tiny-imagenet", tmp_path, partial=True)
    (place / "val" / "val_annotations.txt").write_text("val_0.png n02\n")
    with pytest.raises(ValueError, match=r"val_annotations\.txt is damaged: expected a file, a tab and a class"):
        load("tiny-imagenet", tmp_path, partial=True)


def test_cinic10(tmp_path: Path) -> None:
    for number, part in enumerate(("train", "valid", "test")):
        for label in ("airplane", "truck"):
            array = make.pixels(3, 32, 32, seed=number)
            make.image(tmp_path / "CINIC-10" / part / label / f"{number}.png", array)
    data = load("cinic10", tmp_path, partial=True)
    assert len(data.train[1]) == len(data.test[1]) == 2
    np.testing.assert_array_equal(data.test[0][0], make.pixels(3, 32, 32, seed=2))
    assert len(load("cinic10", tmp_path, partial=True, with_valid=True).train[1]) == 4
