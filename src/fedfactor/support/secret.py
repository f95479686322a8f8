"""A secret seed in a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from fedfactor.support.files import naming, sync

BITS = 128


def secret_seed(path: Path, *, fresh: bool) -> int:
    """Return the secret seed in a file; with `fresh`, draw one if there is no such file.

    Raise ValueError if the file is missing or damaged: another seed would repeat what the run has spent.
    """
    if fresh and not path.exists():
        unfinished = path.with_name(path.name + ".new")
        unfinished.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path), os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(str(secrets.randbits(BITS)))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync(path.parent)
    text = path.read_text(encoding="ascii", errors="replace") if path.exists() else ""
    if not text.isdigit():
        raise ValueError(f"{path}, the run's secret seed, is missing or damaged: restore it from a backup")
    return int(text)
