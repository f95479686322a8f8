"""Errors of a full disk name the path; `/dev/full` is a device that is always full."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedfactor.data.sources.registry import MissingData
from fedfactor.support.files import naming, write_atomically, write_file, write_text


@pytest.fixture
def full(tmp_path: Path) -> Path:
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    return path


def test_a_full_disk_is_named(full: Path) -> None:
    for write in (
        lambda: write_file(full, b"x"),
        lambda: write_file(full, b"x", mode="ab"),
        lambda: write_text(full, "x"),
        lambda: write_atomically(full.with_name("report"), "x"),
    ):
        full.with_name("report.new").unlink(missing_ok=True)
        full.with_name("report.new").symlink_to("/dev/full")
        with pytest.raises(OSError, match=rf"No space left on device: '{full.parent}/(full|report\.new)'"):
            write()


def test_other_errors_keep_their_own_words(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="another"), naming(tmp_path):
        (tmp_path / "another").read_bytes()
    with pytest.raises(OSError, match=f"8 requested and 2 written: '{tmp_path}'"), naming(tmp_path):
        raise OSError("8 requested and 2 written")  # numpy's words
    with pytest.raises(MissingData, match=r"^it is not here$"), naming(tmp_path):
        raise MissingData("it is not here")
