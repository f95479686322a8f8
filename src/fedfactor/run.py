"""A run directory: what a recipe left behind, and how it carries on.

```
recipe.toml     resolved: every default written out
metrics.jsonl   one event a line, only appended to
checkpoint/     the last committed round: the server's tensors and the clients' states
kept/           rounds that the recipe asked to keep, with private states
summary.json    final and best accuracy, bytes, seconds, hashes, versions; written when the run is done
```
"""

from __future__ import annotations

import inspect
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import nn

import fedfactor
from fedfactor.client import Setup
from fedfactor.data import federated
from fedfactor.data import load as load_data
from fedfactor.engines import Engine, Inline
from fedfactor.federation import Federation, Server
from fedfactor.recipe import Recipe, Table, builder_of, read, resolve
from fedfactor.simulation import Result
from fedfactor.store import DiskStore, Journal
from fedfactor.task import Task


class RunError(RuntimeError):
    """A run directory that cannot be used as asked."""


def run(
    recipe: Recipe,
    directory: Path | str | None = None,
    *,
    resume: bool = False,
    engine: Engine | None = None,
    data_dir: Path | str | None = None,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> Result:
    """Run a recipe in a directory (or in memory), or carry on with what is there."""
    task = task_of(recipe, data_dir)
    setup = Setup(task, recipe.method, recipe.optimizer, recipe.codec, recipe.training)
    # Whatever cannot work is found out here, before a directory is claimed.
    in_memory = Federation(setup, recipe.rounds, recipe.capacities, engine or Inline(), on_event=on_event)
    if directory is None:
        return _finished(in_memory)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(directory / "lock")
    try:
        with lock.acquire(timeout=0):
            _claim(recipe, directory, resume)
            result = _finished(_federation(setup, recipe, directory, engine or Inline(), on_event))
            _write(directory / "summary.json", json.dumps(summary(result), indent=1))
            return result
    except filelock.Timeout:
        raise RunError(f"another process is using {directory}; wait for it, or give another directory") from None


def _federation(
    setup: Setup, recipe: Recipe, directory: Path, engine: Engine, on_event: Callable[[dict[str, Any]], None]
) -> Federation:
    store, journal = DiskStore(directory / "checkpoint", recipe.keep_rounds), Journal(directory / "metrics.jsonl")
    return Federation(setup, recipe.rounds, recipe.capacities, engine, store, journal, on_event)


def _finished(federation: Federation) -> Result:
    return Result(federation, federation.run())


def _claim(recipe: Recipe, directory: Path, resume: bool) -> None:
    """Write the recipe into a new directory, or check that an old one is being carried on unchanged."""
    path = directory / "recipe.toml"
    if not path.exists() or not (directory / "checkpoint" / "current").exists():  # nothing was ever committed
        _write(path, recipe.to_toml())
        return
    if not resume:
        raise RunError(f"{directory} holds a run already; carry on with --resume, or give another directory")
    there = resolve(read(path), str(path)).tables
    changes = list(_differences(there, recipe.tables))
    if changes:
        raise RunError(f"{directory} was started with another recipe: {'; '.join(changes[:5])}")


def _differences(old: Any, new: Any, key: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in dict.fromkeys([*old, *new]):
            found += _differences(old.get(name), new.get(name), f"{key}.{name}".removeprefix("."))
        return found
    return [] if old == new else [f"{key} was {old!r} and is now {new!r}"]


def _write(path: Path, text: str) -> None:
    """Replace a file at once, so that nobody ever reads half of it."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(text)
    unfinished.replace(path)


def summary(result: Result) -> dict[str, Any]:
    """Return what `summary.json` holds."""
    found = result.summary
    measured = next((key for key in ("all", "global", "selected_after") if key in found), "")
    scores: dict[str, Any] = found.get(measured, {})
    totals = found["totals"] or result.server.totals
    return {
        "final_accuracy": scores.get("final"),
        "best_accuracy": scores.get("best"),
        "accuracy_of": measured,
        "rounds": found["rounds"],
        "bytes_up": totals["bytes_up"],
        "bytes_down": totals["bytes_down"],
        "macs": totals["macs"],
        "seconds": sum(event.get("seconds", 0.0) for event in result.history),
        "failures": totals["failures"],
        "weights_sha256": found["weights_sha256"],
        "private_sha256": found["private_sha256"],
        "measured": {key: found[key] for key in ("global", "all", "selected_before", "selected_after") if key in found},
        "versions": {
            "fedfactor": fedfactor.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
    }


def task_of(recipe: Recipe, data_dir: Path | str | None = None) -> Task:
    """Load the data of a recipe, split it over the clients, and find its model."""
    tables = recipe.tables
    dataset = load_data(data_dir=data_dir, **tables["data"])
    data = federated(dataset, **tables["partition"])
    return Task(_model(tables["model"], dataset.classes), data, dataset.kind)


def _model(table: Table, classes: int) -> Callable[..., nn.Module]:
    """Return a factory that takes `width` where the model does."""
    options = {key: value for key, value in table.items() if key != "name"}
    builder = builder_of(table["name"])
    parameters = inspect.signature(builder).parameters
    if "classes" in parameters:
        options.setdefault("classes", classes)
    if "width" in parameters:
        full = options.pop("width", 1.0)  # what a capacity of 1 has
        return lambda width=1.0: builder(**options, width=full * width)
    return lambda: builder(**options)


READS = 5
"""Tries to read from a directory that a running run is changing."""


def load(directory: Path | str) -> Run:
    """Open a finished or running run: its recipe, its metrics as a table, its models."""
    return Run(directory)


class Run:
    """A finished or running run, opened for reading."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        if not (self.directory / "recipe.toml").exists():
            raise RunError(f"{directory} is no run directory: it has no recipe.toml")
        self.recipe = resolve(read(self.directory / "recipe.toml"), str(self.directory / "recipe.toml"))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All events so far; a last line that was cut short is left out."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = []
        for number, line in enumerate(lines):
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                if number != len(lines) - 1:
                    raise RunError(f"{path}, line {number + 1}, is not JSON") from None
        return events

    def table(self) -> dict[str, list[Any]]:
        """Return the rounds as columns (`global.1.accuracy`, `totals.bytes_up`, ...): what a data frame takes."""
        rows = [_flat(event) for event in self.metrics if event["event"] == "round"]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    @property
    def summary(self) -> dict[str, Any] | None:
        """What the finished run wrote; `None` while it runs."""
        path = self.directory / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None

    def result(self, data_dir: Path | str | None = None) -> Result:
        """Rebuild the federation at its last commit, to take models from."""
        setup = Setup(
            task_of(self.recipe, data_dir),
            self.recipe.method,
            self.recipe.optimizer,
            self.recipe.codec,
            self.recipe.training,
        )
        store = DiskStore(self.directory / "checkpoint", writing=False)
        federation = Federation(setup, self.recipe.rounds, self.recipe.capacities, store=store)
        last = store.last()
        if last is None:
            raise RunError(f"{self.directory} has no committed round yet")
        federation.journal.events = self.metrics[: last[1]["events"]]
        return Result(federation, Server.from_bytes(*last))

    def model(
        self, capacity: float | None = None, client: int | None = None, data_dir: Path | str | None = None
    ) -> nn.Module:
        """Return the server's model (at a capacity), or a client's own, as a plain module."""
        for attempt in range(READS):
            try:
                result = self.result(data_dir)
                if client is not None:
                    return result.client_model(client)
                return result.model if capacity is None else result.model_at(capacity)
            except FileNotFoundError:  # a running run has just replaced what we were about to read
                if attempt == READS - 1:
                    raise
                time.sleep(0.1)
        raise AssertionError("unreachable")

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r}, {self.recipe.method}, {len(self.metrics)} events)"


def _flat(event: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in event.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
