from __future__ import annotations

import gzip
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfactor.data import MissingData, load
from fedfactor.data.sources import mnist as mnist_module
from tests.helpers import made_data as make


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("inside", ["MNIST/raw", "mnist", "."])
def test_mnist_is_read_exactly(tmp_path: Path, inside: str, end: str) -> None:
    made = make.mnist(tmp_path / inside, end=end)
    data = load("mnist", tmp_path)
    assert data.train[0].shape == (20, 1, 28, 28)
    assert data.train[0].dtype == np.uint8
    np.testing.assert_array_equal(data.train[0][:, 0], made["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.train[1], made["train-labels-idx1-ubyte"])
    np.testing.assert_array_equal(data.test[0][:, 0], made["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.test[1], made["t10k-labels-idx1-ubyte"])
    assert data.test[1].dtype == np.int64
    assert data.classes == 10


def test_fashion_mnist_has_its_own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist_module, "DEBIAN", tmp_path / "debian")
    make.mnist(tmp_path / "MNIST" / "raw")
    with pytest.raises(MissingData, match="apt install dataset-fashion-mnist"):
        load("fashion-mnist", tmp_path)
    made = make.mnist(tmp_path / "debian", train=7)
    data = load("fashion-mnist", tmp_path)
    np.testing.assert_array_equal(data.train[0][:, 0], made["train-images-idx3-ubyte"])
    assert data.class_names[9] == "Ankle boot"


def test_mnist_damages_are_named(tmp_path: Path) -> None:
    place = tmp_path / "MNIST" / "raw"
    make.mnist(place)
    images, labels = place / "train-images-idx3-ubyte.gz", place / "train-labels-idx1-ubyte.gz"
    whole, whole_labels = images.read_bytes(), labels.read_bytes()
    images.write_bytes(whole[:-40])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is damaged: expected a complete gzip file"):
        load("mnist", tmp_path)
    images.write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is damaged: expected a complete gzip file"):
        load("mnist", tmp_path)
    images.write_bytes(gzip.compress(gzip.decompress(whole)[:-1]))
    with pytest.raises(ValueError, match=r"train-images.*expected 15,696 bytes for 20 x 28 x 28, got 15,695"):
        load("mnist", tmp_path)
    images.write_bytes(whole_labels)
    with pytest.raises(ValueError, match=r"expected it to begin with 00 00 08 03, got 00 00 08 01"):
        load("mnist", tmp_path)
    images.write_bytes(gzip.compress(bytes([0, 0, 8, 3]) + b"\xff" * 12))
    with pytest.raises(ValueError, match="is damaged: expected"):
        load("mnist", tmp_path)
    images.write_bytes(whole)
    make.idx(labels, np.full(20, 11, np.uint8))
    with pytest.raises(ValueError, match=r"train-labels.*expected labels of 0 to 9, got 11–11"):
        load("mnist", tmp_path)
    make.idx(labels, np.zeros(19, np.uint8))
    with pytest.raises(ValueError, match=r"train-labels.*expected 20 labels, got 19"):
        load("mnist", tmp_path)


def test_mnist_by_writer(tmp_path: Path) -> None:
    make.mnist(tmp_path / "MNIST" / "raw")
    with pytest.raises(MissingData, match=r"mnist_writers\.npz or .*qmnist-train-labels"):
        load("mnist-writers", tmp_path)
    train, test = np.arange(20) // 5 + 100, np.arange(10) // 5 + 500
    np.savez(tmp_path / "mnist_writers.npz", writer_train=train, writer_test=test)
    data = load("mnist-writers", tmp_path)
    assert data.owners == ("writer 100", "writer 101", "writer 102", "writer 103", "writer 500", "writer 501")
    assert data.train_ids is not None and data.test_ids is not None
    np.testing.assert_array_equal(data.train_ids, np.arange(20) // 5)
    np.testing.assert_array_equal(data.test_ids, np.arange(10) // 5 + 4)
    np.savez(tmp_path / "mnist_writers.npz", writer_train=train[:-1], writer_test=test)
    with pytest.raises(ValueError, match="writers of 19 images, but MNIST here has 20"):
        load("mnist-writers", tmp_path)
    np.savez(tmp_path / "mnist_writers.npz", writer_train=np.array([{}], dtype=object), writer_test=test)
    with pytest.raises(ValueError, match=r"mnist_writers\.npz is damaged"):
        load("mnist-writers", tmp_path)


def test_mnist_by_writer_from_qmnist(tmp_path: Path) -> None:
    make.mnist(tmp_path / "MNIST" / "raw")
    for part, count in (("train", 20), ("test", 10)):
        table = np.zeros((count, 8), np.int32)
        table[:, 2] = np.arange(count) // 2 + 70_000
        make.idx(tmp_path / f"qmnist-{part}-labels.idx2-int.gz", table)
    data = load("mnist-writers", tmp_path)
    assert data.train_ids is not None
    np.testing.assert_array_equal(data.train_ids, np.arange(20) // 2)
    assert data.owners[0] == "writer 70000"


def test_cifar10_is_read_exactly(tmp_path: Path) -> None:
    made = make.cifar10(tmp_path)
    data = load("cifar10", tmp_path)
    rows = np.concatenate(made[:5])
    np.testing.assert_array_equal(data.train[1], rows[:, 0])
    np.testing.assert_array_equal(data.train[0], rows[:, 1:].reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(data.test[0].reshape(4, -1), made[5][:, 1:])
    assert data.class_names[3] == "class3"
    assert str(data) == "cifar10: 20 train and 4 test, 3 x 32 x 32 uint8, 10 classes"


def test_cifar100_takes_the_fine_labels(tmp_path: Path) -> None:
    made = make.cifar100(tmp_path)
    data = load("cifar100", tmp_path)
    np.testing.assert_array_equal(data.train[1], made["train"][:, 1])
    np.testing.assert_array_equal(data.train[0].reshape(6, -1), made["train"][:, 2:])
    assert data.classes == 100


def test_cifar_damages_are_named(tmp_path: Path) -> None:
    make.cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"data_batch_3\.bin is damaged: expected a multiple of 3,073 bytes"):
        load("cifar10", tmp_path)
    path.write_bytes(b"\x0b" + whole[1:])
    with pytest.raises(ValueError, match=r"data_batch_3\.bin is damaged: expected labels of 0 to 9"):
        load("cifar10", tmp_path)
    path.write_bytes(whole)
    (path.parent / "batches.meta.txt").unlink()
    with pytest.raises(ValueError, match=r"is incomplete: expected the names of the classes in batches\.meta\.txt"):
        load("cifar10", tmp_path)


def test_the_pickled_cifar_is_not_read(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (exec, ("raise SystemExit('unpickled')",))

    place = tmp_path / "cifar-10-batches-py"
    place.mkdir()
    (place / "data_batch_1").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(MissingData, match=r"curl -L .*cifar-10-binary\.tar\.gz"):
        load("cifar10", tmp_path)


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
    with pytest.raises(
        ImportError, match=r"reading images such as 1\.png needs PIL: pip install 'fedfactor\[images\]'"
    ):
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
    data = load("tiny-imagenet", tmp_path)
    assert data.class_names == ("goldfish", "centipede")
    np.testing.assert_array_equal(data.train[1], [0, 0, 1])
    np.testing.assert_array_equal(data.train[0][1], np.repeat(grey, 3, 0))
    np.testing.assert_array_equal(data.train[0][2], make.pixels(3, 64, 64, seed=0))
    np.testing.assert_array_equal(data.test[1], [1])
    (place / "val" / "val_annotations.txt").write_text("val_1.png\tn02\t0\t0\t63\t63\n")
    with pytest.raises(ValueError, match=r"val_1\.png is missing: expected an image"):
        load("tiny-imagenet", tmp_path)
    (place / "val" / "val_annotations.txt").write_text("val_0.png n02\n")
    with pytest.raises(ValueError, match=r"val_annotations\.txt is damaged: expected a file, a tab and a class"):
        load("tiny-imagenet", tmp_path)


def test_cinic10(tmp_path: Path) -> None:
    for number, part in enumerate(("train", "valid", "test")):
        for label in ("airplane", "truck"):
            array = make.pixels(3, 32, 32, seed=number)
            make.image(tmp_path / "CINIC-10" / part / label / f"{number}.png", array)
    data = load("cinic10", tmp_path)
    assert len(data.train[1]) == len(data.test[1]) == 2
    np.testing.assert_array_equal(data.test[0][0], make.pixels(3, 32, 32, seed=2))
    assert len(load("cinic10", tmp_path, with_valid=True).train[1]) == 4
