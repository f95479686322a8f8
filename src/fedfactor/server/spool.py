"""A temporary file for bytes that a round needs again later."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from fedfactor.protocol.message import Bytes


class Spool:
    """Bytes by key, in a temporary file without a name: it is gone when the process ends, however it ends."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._file: Any = None
        self._places: dict[Hashable, tuple[int, int]] = {}
        self._end = 0

    def put(self, key: Hashable, data: Bytes) -> None:
        """Write bytes to the file."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        self._file.seek(self._end)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._places[key] = self._end, len(data)
        self._end += len(data)

    def read(self, key: Hashable, start: int = 0, end: int | None = None) -> bytearray:
        """Return the bytes of a key, or a part of them."""
        place, length = self._places[key]
        data = bytearray((length if end is None else end) - start)
        self._file.seek(place + start)
        view = memoryview(data)
        while view:
            view = view[self._file.readinto(view) :]
        return data

    def take(self, key: Hashable) -> bytearray:
        """Return the bytes of a key and forget them; the file becomes empty with the last of them."""
        data = self.read(key)
        del self._places[key]
        if not self._places:
            self._file.truncate(0)
            self._end = 0
        return data
