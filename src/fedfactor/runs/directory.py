"""Run directories: finding them, locks, and checks that a directory is free or holds the same run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import filelock

from fedfactor.protocol.settings import Capacities, Reported
from fedfactor.runs.recipe import Recipe, read, resolve


class RunError(RuntimeError):
    """A run directory cannot be used as requested."""


def finished(recipe: Recipe, directory: Path | str) -> dict[str, Any] | None:
    """Return the summary of this recipe's run, or `None` if it is not finished."""
    directory = Path(directory)
    check_claim(recipe, directory, resume=True)
    path = directory / "summary.json"
    if not path.exists() or not (directory / "checkpoint" / "current").exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found if found["rounds"] == recipe.rounds.rounds else None


def diverged(recipe: Recipe, directory: Path | str) -> str | None:
    """Return why this recipe's run ended before its last round: its numbers were no longer finite. Otherwise `None`."""
    directory = Path(directory)
    check_claim(recipe, directory, resume=True)
    path = directory / "metrics.jsonl"
    last = path.read_text().splitlines()[-1:] if path.exists() else []
    try:
        event: dict[str, Any] = json.loads(last[0]) if last else {}
    except json.JSONDecodeError:  # the process was killed while it wrote this line
        return None
    return str(event["reason"]) if event.get("event") == "diverged" else None


def find_runs(paths: Iterable[Path | str]) -> list[Path]:
    """Return the run directories at and below these paths, each once, in order.

    Runs that `fedfactor compare --tune` has made to choose settings are found only in or below their own folder.
    """
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        below = list(_below(path))
        if not below:
            raise RunError(
                f"{path} is not a run directory and contains none: there is no recipe.toml in it or below it"
            )
        found |= {one.resolve(): one for one in below if one.resolve() not in found}
    return list(found.values())


def _below(path: Path) -> Iterator[Path]:
    if (path / "recipe.toml").exists():
        yield path
    elif path.is_dir():
        for one in sorted(path.iterdir()):
            if not (one / TUNED).exists():
                yield from _below(one)


TUNED = "choices.json"
"""The file that marks a folder of runs for tuning; it has the settings that were tried and chosen for each method."""


@contextlib.contextmanager
def locked(directory: Path, name: str = "lock") -> Iterator[None]:
    """Create a directory and lock it against other processes. Raise RunError if it is in use or cannot be created."""
    lock = filelock.FileLock(directory / name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise RunError(f"another process is using {directory}; wait for it, or give another directory") from None
    except OSError as error:
        raise RunError(f"{directory} cannot be a run directory ({error}); give another one") from None
    try:
        yield
    finally:
        lock.release()


def check_claim(recipe: Recipe, directory: Path, resume: bool) -> None:
    """Raise RunError unless the directory is free, or holds a run of the same recipe and `resume` is true."""
    path = directory / "recipe.toml"
    if not (directory / "checkpoint" / "current").exists():
        return  # nothing is committed
    if not path.exists():
        raise RunError(f"{directory} holds a run that has no recipe.toml; give another directory")
    if not resume:
        raise RunError(f"{directory} holds a run already; continue it with --resume, or give another directory")
    old = resolve(read(path), str(path)).tables
    changes = list(_differences(old, recipe.tables))
    if changes:
        raise RunError(f"{directory} was started with another recipe: {'; '.join(changes[:5])}")


def _differences(old: Any, new: Any, key: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in dict.fromkeys([*old, *new]):
            found += _differences(old.get(name), new.get(name), f"{key}.{name}".removeprefix("."))
        return found
    return [] if old == new else [f"{key} was {old!r} and is now {new!r}"]


def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically, so that no reader sees half of it."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(text)
    unfinished.replace(path)


ENROLLED = "flower.json"
"""The file in which a run on Flower records its clients."""


def lacking(directory: Path) -> list[int]:
    """Return the clients of a run on Flower that should have received its last model and have not."""
    path, pointer = directory / ENROLLED, directory / "checkpoint" / "current"
    if not path.exists() or not pointer.exists():
        return []
    now, clients = pointer.read_text().removeprefix("round-"), json.loads(path.read_text())["clients"]
    return sorted(int(number) for number, client in clients.items() if client.get("model", now) != now)


def reported(capacities: Capacities, directory: Path) -> Capacities:
    """Return capacities with those that the run's clients reported, if they reported any."""
    path = directory / ENROLLED
    recorded = json.loads(path.read_text())["start"].get("capacities", {}) if path.exists() else {}
    given = {int(client): float(capacity) for client, capacity in recorded.items()}
    return Reported(capacities.shares, capacities.dynamic, capacities.cover, given) if given else capacities
