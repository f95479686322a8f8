"""Finding and reading files of data sets. Errors name the file, what was expected and what was found."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedfactor.data.dataset import Array


def first(places: Iterable[Path]) -> Path | None:
    """Return the first path that exists."""
    return next((place for place in places if place.exists()), None)


def read_bytes(path: Path) -> bytes:
    """Read a file, decompressed if its name ends in .gz."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return file.read()
        return path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged: expected a complete gzip file, but {error}") from error


def read_text(path: Path) -> str:
    """Read a file of UTF-8 text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: expected UTF-8 text, but {error}") from error


def read_lines(path: Path) -> list[str]:
    """Read the non-empty lines of a text file."""
    return [line.strip() for line in read_text(path).splitlines() if line.strip()]


def read_idx(path: Path, dimensions: int, dtype: str = "u1") -> Array:
    """Read an idx file (big-endian): two zero bytes, a type, the number of dimensions, their sizes, the values."""
    code = {"u1": 0x08, ">i4": 0x0C}[dtype]
    data = read_bytes(path)
    head = 4 + 4 * dimensions
    if len(data) < head or data[:4] != bytes([0, 0, code, dimensions]):
        raise ValueError(
            f"{path} is not an idx file of {dimensions} dimensions: expected it to begin with "
            f"{bytes([0, 0, code, dimensions]).hex(' ')}, got {data[:4].hex(' ') or 'nothing'}"
        )
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", dimensions, 4))
    # Python's own integers: sizes in a damaged header must not overflow.
    expected = head + np.dtype(dtype).itemsize * math.prod(shape)
    if len(data) != expected:
        raise ValueError(
            f"{path} is damaged: expected {expected:,} bytes for {' x '.join(map(str, shape))}, got {len(data):,}"
        )
    return np.frombuffer(data, dtype, offset=head).reshape(shape)


def check_labels(path: Path, labels: Array, classes: int) -> None:
    """Raise ValueError if a label of a file is not one of the classes."""
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(f"{path} is damaged: expected labels of 0 to {classes - 1}, got {labels.min()}–{labels.max()}")
