"""Arrays that are made once and mapped: changed, damaged and concurrent caches."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fedfactor.data import Dataset, load
from tests.helpers import made_data as make


def test_arrays_are_mapped_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedfactor.data.sources import cifar

    make.cifar10(tmp_path)
    first = load("cifar10", tmp_path, partial=True)
    assert isinstance(first.train[0], np.memmap)
    with monkeypatch.context() as patch:
        patch.setattr(cifar, "_rows", lambda *_: pytest.fail("read again"))
        again = load("cifar10", tmp_path, partial=True)
    np.testing.assert_array_equal(again.train[0], first.train[0])
    # Writing into the array must not reach the file.
    again.train[0][0] = 0
    np.testing.assert_array_equal(load("cifar10", tmp_path, partial=True).train[0], first.train[0])
    assert not list((tmp_path / ".fedfactor").glob("new-*"))


def test_changed_files_and_damaged_caches_are_read_again(tmp_path: Path) -> None:
    make.cifar10(tmp_path)
    assert len(load("cifar10", tmp_path, partial=True).train[1]) == 20
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin"
    path.write_bytes(path.read_bytes() * 2)
    assert len(load("cifar10", tmp_path, partial=True).train[1]) == 24
    for folder in (tmp_path / ".fedfactor").iterdir():
        (folder / "train_x.npy").write_bytes((folder / "train_x.npy").read_bytes()[:200])
    assert load("cifar10", tmp_path, partial=True).train[0].shape == (24, 3, 32, 32)


def test_a_failure_leaves_no_cache(tmp_path: Path) -> None:
    make.cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged"):
        load("cifar10", tmp_path, partial=True)
    assert list((tmp_path / ".fedfactor").iterdir()) == []


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make.cifar10(tmp_path / "data")
    (tmp_path / "data" / ".fedfactor").write_text("in the way")
    assert len(load("cifar10", tmp_path / "data", partial=True).train[1]) == 20
    assert list((tmp_path / "cache" / "fedfactor" / "data" / ".fedfactor").glob("cifar10-*"))
    (tmp_path / "other").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with pytest.raises(OSError, match="the arrays of cifar10 cannot be written"):
        load("cifar10", tmp_path / "data", partial=True)


def test_what_cannot_be_removed_is_gone_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make.cifar10(tmp_path)
    load("cifar10", tmp_path, partial=True)
    (there,) = (tmp_path / ".fedfactor").iterdir()
    for path in there.iterdir():
        path.unlink()
    there.rmdir()
    there.write_text("a file in the way")
    assert len(load("cifar10", tmp_path, partial=True).train[1]) == 20
    assert len(list((tmp_path / ".fedfactor").iterdir())) == 1


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    for name, age in (("new-old", 100_000), ("new-young", 0)):
        left = tmp_path / ".fedfactor" / name
        left.mkdir(parents=True)
        os.utime(left, (time.time() - age,) * 2)
    make.cifar10(tmp_path)
    load("cifar10", tmp_path, partial=True)
    assert [path.name for path in (tmp_path / ".fedfactor").glob("new-*")] == ["new-young"]


def test_many_at_once(tmp_path: Path) -> None:
    make.cifar10(tmp_path)
    found: list[Dataset] = []
    threads = [threading.Thread(target=lambda: found.append(load("cifar10", tmp_path, partial=True))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for data in found:
        np.testing.assert_array_equal(data.train[0], found[0].train[0])
    assert len(list((tmp_path / ".fedfactor").iterdir())) == 1
