"""Files that survive a crash."""

from __future__ import annotations

import os
from pathlib import Path

from fedfactor.protocol.message import Bytes


def sync(directory: Path) -> None:
    """Wait until the disk has a directory's new names."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: Bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
