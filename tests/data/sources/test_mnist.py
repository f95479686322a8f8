"""MNIST and Fashion-MNIST in their binary form, and MNIST by writer."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from fedfactor.data import MissingData, load
from fedfactor.data.sources import mnist as mnist_module
from tests.helpers import made_data as make


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("inside", ["MNIST/raw", "mnist", "."])
def test_mnist_is_read_exactly(tmp_path: Path, inside: str, end: str) -> None:
    made = make.mnist(tmp_path / inside, end=end)
    data = load("mnist", tmp_path, partial=True)
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
        load("fashion-mnist", tmp_path, partial=True)
    made = make.mnist(tmp_path / "debian", train=7)
    data = load("fashion-mnist", tmp_path, partial=True)
    np.testing.assert_array_equal(data.train[0][:, 0], made["train-images-idx3-ubyte"])
    assert data.class_names[9] == "Ankle boot"


def test_mnist_damages_are_named(tmp_path: Path) -> None:
    place = tmp_path / "MNIST" / "raw"
    make.mnist(place)
    images, labels = place / "train-images-idx3-ubyte.gz", place / "train-labels-idx1-ubyte.gz"
    whole, whole_labels = images.read_bytes(), labels.read_bytes()
    images.write_bytes(whole[:-40])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is damaged: expected a complete gzip file"):
        load("mnist", tmp_path, partial=True)
    images.write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is damaged: expected a complete gzip file"):
        load("mnist", tmp_path, partial=True)
    images.write_bytes(gzip.compress(gzip.decompress(whole)[:-1]))
    with pytest.raises(ValueError, match=r"train-images.*expected 15,696 bytes for 20 x 28 x 28, got 15,695"):
        load("mnist", tmp_path, partial=True)
    images.write_bytes(whole_labels)
    with pytest.raises(ValueError, match=r"expected it to begin with 00 00 08 03, got 00 00 08 01"):
        load("mnist", tmp_path, partial=True)
    images.write_bytes(gzip.compress(bytes([0, 0, 8, 3]) + b"\xff" * 12))
    with pytest.raises(ValueError, match="is damaged: expected"):
        load("mnist", tmp_path, partial=True)
    images.write_bytes(whole)
    make.idx(labels, np.full(20, 11, np.uint8))
    with pytest.raises(ValueError, match=r"train-labels.*expected labels of 0 to 9, got 11–11"):
        load("mnist", tmp_path, partial=True)
    make.idx(labels, np.zeros(19, np.uint8))
    with pytest.raises(ValueError, match=r"train-labels.*expected 20 labels, got 19"):
        load("mnist", tmp_path, partial=True)


def test_mnist_by_writer(tmp_path: Path) -> None:
    make.mnist(tmp_path / "MNIST" / "raw")
    with pytest.raises(MissingData, match=r"mnist_writers\.npz or .*qmnist-train-labels"):
        load("mnist-writers", tmp_path, partial=True)
    train, test = np.arange(20) // 5 + 100, np.arange(10) // 5 + 500
    np.savez(tmp_path / "mnist_writers.npz", writer_train=train, writer_test=test)
    data = load("mnist-writers", tmp_path, partial=True)
    assert data.owners == ("writer 100", "writer 101", "writer 102", "writer 103", "writer 500", "writer 501")
    assert data.train_ids is not None and data.test_ids is not None
    np.testing.assert_array_equal(data.train_ids, np.arange(20) // 5)
    np.testing.assert_array_equal(data.test_ids, np.arange(10) // 5 + 4)
    np.savez(tmp_path / "mnist_writers.npz", writer_train=train[:-1], writer_test=test)
    with pytest.raises(ValueError, match="writers of 19 images, but MNIST here has 20"):
        load("mnist-writers", tmp_path, partial=True)
    np.savez(tmp_path / "mnist_writers.npz", writer_train=np.array([{}], dtype=object), writer_test=test)
    with pytest.raises(ValueError, match=r"mnist_writers\.npz is damaged"):
        load("mnist-writers", tmp_path, partial=True)


def test_mnist_by_writer_from_qmnist(tmp_path: Path) -> None:
    make.mnist(tmp_path / "MNIST" / "raw")
    for part, count in (("train", 20), ("test", 10)):
        table = np.zeros((count, 8), np.int32)
        table[:, 2] = np.arange(count) // 2 + 70_000
        make.idx(tmp_path / f"qmnist-{part}-labels.idx2-int.gz", table)
    data = load("mnist-writers", tmp_path, partial=True)
    assert data.train_ids is not None
    np.testing.assert_array_equal(data.train_ids, np.arange(20) // 2)
    assert data.owners[0] == "writer 70000"
