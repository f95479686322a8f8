"""Run directories: finding them, locks, and checks that a directory is free or holds the same run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import filelock

from fedfactor.protocol.settings import Capacities, Reported
from fedfactor.runs.recipe import Recipe, read, recorded
from fedfactor.server.store import Damaged, last_version


class RunError(RuntimeError):
    """A run directory cannot be used as requested."""


def finished(recipe: Recipe, directory: Path | str) -> dict[str, Any] | None:
    """Return the summary of this recipe's run, or `None` if it is not finished."""
    directory = Path(directory)
    check_claim(recipe, directory, resume=True)
    found = read_summary(directory)
    if not found or committed(directory) < 0:
        return None
    spent, privacy = found.get("privacy", {}), recipe.privacy
    stopped = privacy is not None and "stopped" in spent and spent.get("budget") == privacy.budget
    return found if stopped or found["rounds"] == recipe.rounds.rounds else None


def read_summary(directory: Path) -> dict[str, Any] | None:
    """Return the contents of `summary.json`, or `None` if there is no such file."""
    path = directory / "summary.json"
    try:
        found: dict[str, Any] | None = json.loads(path.read_bytes()) if path.exists() else None
    except ValueError as error:
        raise Damaged(path, str(error)) from None
    return found


def committed(directory: Path) -> int:
    """Return the last committed round of a run directory; -1 if there is none."""
    return last_version(directory / "checkpoint")


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
    """Raise RunError unless the directory is free, or holds a run of the same recipe and `resume` is true.

    A resumed run may be longer, and be measured and kept in another way: see `MAY_CHANGE`.
    """
    path = directory / "recipe.toml"
    if committed(directory) < 0:
        return
    if not path.exists():
        raise RunError(f"{directory} holds a run that has no recipe.toml; give another directory")
    old = read(path)
    if ("data" not in old) != recipe.from_python:
        how = "from Python, by simulate()" if "data" not in old else "from a recipe"
        raise RunError(f"{directory} holds a run that was started {how}; continue it there, or give another directory")
    if not resume:
        raise RunError(f"{directory} holds a run already; continue it with --resume, or give another directory")
    if recipe.from_python:
        return  # `Federation` compares the settings, since a recipe cannot describe all objects
    before = recorded(path)
    fixed = "train.rounds" if recipe.training.looks_ahead else ""
    changes = [
        f"{key} was {was!r} and is now {now!r}{' (the schedule depends on it)' if key == fixed else ''}"
        for key, was, now in _differences(before.tables, recipe.tables)
        if key == fixed or not key.startswith(MAY_CHANGE)
    ]
    if changes:
        raise RunError(f"{directory} was started with another recipe: {'; '.join(changes[:5])}")
    missed = sorted(n for n in {*recipe.keep_rounds} - {*before.keep_rounds} if n < committed(directory))
    if missed:
        raise RunError(f"run.keep_rounds: {directory} has passed {missed} without keeping them; leave them out")


MAY_CHANGE = ("train.rounds", "train.quorum", "privacy.budget", "evaluate.", "run.keep_rounds", "model.base_sha256")
"""Beginnings of the keys that may change when a run is resumed; `train.rounds` only if the schedule allows it. A run
records the hash of its base itself, and `Federation` compares it."""


def _differences(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Return key, old value and new value of each difference."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in dict.fromkeys([*old, *new]):
            found += _differences(old.get(name), new.get(name), f"{key}.{name}".removeprefix("."))
        return found
    return [] if old == new else [(key, old, new)]


ENROLLED = "flower.json"
"""The file in which a run on Flower records its clients."""


def lacking(directory: Path) -> list[int]:
    """Return the clients of a run on Flower that should have received its last model and have not."""
    path, now = directory / ENROLLED, str(committed(directory))
    if not path.exists() or now == "-1":
        return []
    clients = json.loads(path.read_text())["clients"]
    return sorted(int(number) for number, client in clients.items() if client.get("model", now) != now)


def left_out(directory: Path) -> list[int]:
    """Return the clients that a run does not ask any more because they sent invalid replies."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rounds = [line for line in lines if line.endswith("\n") and '"left_out"' in line]
    found: list[int] = json.loads(rounds[-1])["left_out"] if rounds else []
    return found


def reported(capacities: Capacities, directory: Path) -> Capacities:
    """Return capacities with those that the run's clients reported, if they reported any."""
    path = directory / ENROLLED
    recorded = json.loads(path.read_text())["start"].get("capacities", {}) if path.exists() else {}
    given = {int(client): float(capacity) for client, capacity in recorded.items()}
    return Reported(capacities.shares, capacities.dynamic, capacities.cover, given) if given else capacities
