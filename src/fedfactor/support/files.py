"""Writing files so that they survive a crash, and so that a full disk is reported with the path."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


def sync(directory: Path) -> None:
    """Wait until new names in a directory are on disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, *parts: bytes | bytearray | memoryview, mode: str = "wb") -> None:
    """Write a file, or append to it if the mode is `ab`, and wait until it is on disk."""
    with naming(path), path.open(mode) as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    with naming(path):
        path.write_text(text, encoding="utf-8")


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file atomically, so that no reader sees half of it, even after a crash."""
    unfinished = path.with_name(path.name + ".new")
    write_file(unfinished, text.encode())
    unfinished.replace(path)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError that names no file: the errors of a full disk do not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or (error.errno is None and type(error) is not OSError):
            raise  # it names its file, or is an error of this library's own
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error
