"""CIFAR-10 and CIFAR-100 in their binary form."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from fedfactor.data import MissingData, load
from tests.helpers import made_data as make


def test_cifar10_is_read_exactly(tmp_path: Path) -> None:
    made = make.cifar10(tmp_path)
    data = load("cifar10", tmp_path, partial=True)
    rows = np.concatenate(made[:5])
    np.testing.assert_array_equal(data.train[1], rows[:, 0])
    np.testing.assert_array_equal(data.train[0], rows[:, 1:].reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(data.test[0].reshape(4, -1), made[5][:, 1:])
    assert data.class_names[3] == "class3"
    assert str(data) == "cifar10: 20 train and 4 test, 3 x 32 x 32 uint8, 10 classes"


def test_cifar100_takes_the_fine_labels(tmp_path: Path) -> None:
    made = make.cifar100(tmp_path)
    data = load("cifar100", tmp_path, partial=True)
    np.testing.assert_array_equal(data.train[1], made["train"][:, 1])
    np.testing.assert_array_equal(data.train[0].reshape(6, -1), made["train"][:, 2:])
    assert data.classes == 100


def test_cifar_damages_are_named(tmp_path: Path) -> None:
    make.cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"data_batch_3\.bin is damaged: expected a multiple of 3,073 bytes"):
        load("cifar10", tmp_path, partial=True)
    path.write_bytes(b"\x0b" + whole[1:])
    with pytest.raises(ValueError, match=r"data_batch_3\.bin is damaged: expected labels of 0 to 9"):
        load("cifar10", tmp_path, partial=True)
    path.write_bytes(whole)
    (path.parent / "batches.meta.txt").unlink()
    with pytest.raises(ValueError, match=r"is incomplete: expected the names of the classes in batches\.meta\.txt"):
        load("cifar10", tmp_path, partial=True)


def test_a_missing_file_of_cifar_is_named(tmp_path: Path) -> None:
    make.cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    wanted = (
        r"4 of 10,000 images in data_batch_2\.bin, 0 of 10,000 images in data_batch_3\.bin, .* data\.partial = true"
    )
    with pytest.raises(ValueError, match=wanted):
        load("cifar10", tmp_path)
    assert len(load("cifar10", tmp_path, partial=True).train[1]) == 16
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    with pytest.raises(
        MissingData, match=rf"looked for in {tmp_path}/cifar-10-batches-bin/test_batch\.bin or .* not found"
    ):
        load("cifar10", tmp_path, partial=True)


def test_the_pickled_cifar_is_not_read(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (exec, ("raise SystemExit('unpickled')",))

    place = tmp_path / "cifar-10-batches-py"
    place.mkdir()
    (place / "data_batch_1").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(MissingData, match=r"curl -L .*cifar-10-binary\.tar\.gz"):
        load("cifar10", tmp_path, partial=True)
