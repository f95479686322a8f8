"""Writing files so that they survive a crash."""

from __future__ import annotations

import os
from pathlib import Path

from fedfactor.protocol.message import Bytes


def sync(directory: Path) -> None:
    """Wait until new names in a directory are on disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: Bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
