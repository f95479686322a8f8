"""A cache of arrays: they are made from the files of a data set once and then memory-mapped, so processes share pages.

The cache is in the data folder, under a name that depends on the files and the options it was made from. It is written
under a temporary name and then renamed, so that an incomplete cache is never read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedfactor.data.dataset import Array
from fedfactor.data.sources.registry import user_folder
from fedfactor.support.files import naming, write_text

FOLDER = ".fedfactor"
VERSION = 1
"""To be increased whenever a loader makes other arrays of the same files."""
STALE_SECONDS = 86_400


@dataclass
class Draft:
    """A cache that is being written: arrays, each in its file, and facts as JSON."""

    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)

    def put(self, name: str, array: Array) -> None:
        """Write an array."""
        np.save(self.folder / f"{name}.npy", np.ascontiguousarray(array), allow_pickle=False)

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> Array:
        """Return an array on disk to be filled, since data sets may be larger than memory."""
        if 0 in shape:
            self.put(name, np.empty(shape, dtype))
            return np.empty(shape, dtype)
        path = self.folder / f"{name}.npy"
        array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        if hasattr(os, "posix_fallocate"):  # without it, a full disk would end the process when the array is filled
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return array


def cached(
    root: Path, name: str, made_from: Iterable[Path], options: Any, build: Callable[[Draft], None]
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the arrays and facts that `build` makes, or has made before from the same files and options."""
    key = f"{name}-{_stamp(made_from, options)}"
    homes = [root / FOLDER, user_folder() / FOLDER]
    for home in homes:
        if (found := _read(home / key)) is not None:
            return found
    last: OSError | None = None
    for home in homes:
        draft = Draft(home / f"new-{name}-{secrets.token_hex(8)}")
        try:
            # Not tempfile: whoever can read the data should be able to read the cache.
            draft.folder.mkdir(parents=True)
        except OSError as error:
            last = error
            continue
        _sweep(home)
        if (found := _write(draft, home / key, build)) is not None:
            return found
    reason = f" ({last})" if last else ""
    raise OSError(f"the arrays of {name} cannot be written: tried {homes[0]} and {homes[1]}{reason}")


def _write(
    draft: Draft, target: Path, build: Callable[[Draft], None]
) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """Build a cache and give it its name; `None` if something of that name can be neither read nor removed."""
    try:
        with naming(draft.folder):
            build(draft)
        write_text(draft.folder / "facts.json", json.dumps(draft.facts))
        try:
            draft.folder.rename(target)
        except OSError:  # something has that name: the same cache, written by another process, or one that is damaged
            if _read(target) is None:
                shutil.rmtree(target, ignore_errors=True)
                with contextlib.suppress(OSError):
                    draft.folder.rename(target)
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
    return _read(target)


def _read(folder: Path) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """Map the arrays of a cache; `None` if there is none, or if it is incomplete."""
    try:
        facts = json.loads((folder / "facts.json").read_text())
        return {path.stem: _map(path) for path in sorted(folder.glob("*.npy"))}, facts
    except (OSError, ValueError, EOFError):
        return None


def _map(path: Path) -> Array:
    # Copy on write: torch needs writable arrays, and writing must not change the file.
    mapped: Array = np.load(path, mmap_mode="c", allow_pickle=False)
    return mapped


def _stamp(made_from: Iterable[Path], options: Any) -> str:
    """Hash paths, sizes and times of files: reading all their bytes would be as slow as no cache."""
    parts: list[Any] = [VERSION, options]
    for path in made_from:
        status = path.stat()
        parts.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _sweep(home: Path) -> None:
    """Remove incomplete caches that killed processes have left."""
    for left in home.glob("new-*"):
        # Another process may be doing the same.
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
