"""Compare methods over seeds: run the missing cells and resume interrupted ones.

Each cell has its own run directory, `DIR/METHOD/seed-N`. For one seed, all methods have the same partition and the same
cohorts, because both depend on the recipe and the seed only; a comparison in which they would differ is refused.
"""

from __future__ import annotations

import fnmatch
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fedfactor.registry import create
from fedfactor.runs import recipe as recipes
from fedfactor.runs.directory import finished
from fedfactor.runs.execute import run, summary_of
from fedfactor.runs.recipe import RecipeError

SAME = ("data", "partition", "capacities", "train.rounds", "train.cohort", "train.seed")
"""Settings that must be equal for all methods: they decide which client has which data, and the cohorts."""


@dataclass(frozen=True)
class Cell:
    """One run of a comparison: a method, a seed, the recipe and the run directory."""

    method: str
    seed: int
    recipe: recipes.Recipe
    directory: Path

    @property
    def name(self) -> str:
        """Method and seed, for messages."""
        return f"{self.method}, seed {self.seed}"


@dataclass(frozen=True)
class CellOutcome:
    """The summary of a finished cell, or why it failed."""

    cell: Cell
    summary: Mapping[str, Any] | None
    failure: str = ""


def cells(
    tables: recipes.Table,
    methods: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    *,
    settings: Sequence[str] = (),
    method_settings: Sequence[str] = (),
    only: str = "*",
    where: str = "recipe",
) -> list[Cell]:
    """Return all cells of a comparison, resolved and checked before anything runs.

    If the recipe, or a cell of its sweep, names a method, that method takes its settings from there; other methods have
    their defaults. `method_settings` have the form `fedpara.gamma=0.3`.
    """
    for name, given in (("methods", methods), ("seeds", seeds)):
        if not given or len(set(given)) != len(given):
            raise RecipeError(f"a comparison needs at least one of {name}, without repetitions; got {list(given)}")
    for method in methods:
        create("methods", method)  # an unknown name raises an error that lists the methods
    own = _own_settings(methods, method_settings)
    found = []
    for seed in seeds:
        row = []
        for method in methods:
            chosen = _tables_of(tables, method, list(settings), only, where)
            chosen = recipes.override(chosen, own[method])
            chosen["train"] = {key: value for key, value in chosen.get("train", {}).items() if key != "seed"}
            resolved = recipes.resolve({**chosen, "seed": seed}, f"{where} ({method}, seed {seed})")
            row.append(Cell(method, seed, resolved, folder / method / f"seed-{seed}"))
        _check_same(row)
        found += row
    return found


def _own_settings(methods: Sequence[str], assignments: Sequence[str]) -> dict[str, list[str]]:
    """Group settings such as `fedpara.gamma=0.3` by method."""
    own: dict[str, list[str]] = {method: [] for method in methods}
    for assignment in assignments:
        method, dot, rest = assignment.partition(".")
        if not dot or "=" not in rest or method not in own:
            raise RecipeError(
                f"--method-set takes method.field=value with one of {', '.join(methods)}, got {assignment!r}"
            )
        own[method].append(f"method.{rest}")
    return own


def _tables_of(tables: recipes.Table, method: str, settings: list[str], only: str, where: str) -> recipes.Table:
    """Return the recipe of a method: the sweep's cell for this method, or the base recipe with this method."""
    found = recipes.overridden_cells(tables, settings)
    about = {
        name: cell
        for name, cell in found.items()
        if fnmatch.fnmatchcase(name, only) and _method_of(cell) == method and "method" in cell
    }
    if len(about) > 1:
        raise RecipeError(
            f"{where}: several cells of the sweep use {method}: {', '.join(about)}; choose one with --only"
        )
    if about:
        return next(iter(about.values()))
    base = recipes.override({key: value for key, value in tables.items() if key != "sweep"}, settings)
    return {**base, "method": {"name": method}}


def _method_of(cell: recipes.Table) -> str:
    section = cell.get("method", {})
    return str(section.get("name", "fedavg")) if isinstance(section, dict) else ""


def _check_same(row: Sequence[Cell]) -> None:
    """Raise RecipeError if two methods would not have the same data and cohorts."""
    for cell in row[1:]:
        for key in SAME:
            ours, theirs = (_at(one.recipe.tables, key) for one in (cell, row[0]))
            if ours != theirs:
                raise RecipeError(
                    f"{row[0].method} and {cell.method} cannot be compared: {key} is {theirs!r} and {ours!r}. Set one "
                    f"value for both with --set {key}=..."
                )


def _at(tables: recipes.Table, key: str) -> Any:
    for part in key.split("."):
        tables = tables[part]
    return tables


# Running.

Listener = Callable[[dict[str, Any]], None]


def run_cells(
    chosen: Sequence[Cell],
    *,
    jobs: int = 1,
    data_dir: Path | str | None = None,
    on_start: Callable[[Cell], Listener] = lambda cell: lambda event: None,
) -> list[CellOutcome]:
    """Run the cells that are not finished, `jobs` at a time; more than one run in separate processes.

    A cell that fails does not affect the others. Results do not depend on `jobs`.
    """
    done = {cell.directory: finished(cell.recipe, cell.directory) for cell in chosen}
    missing = [cell for cell in chosen if done[cell.directory] is None]
    ran = _here(missing, data_dir, on_start) if jobs == 1 else _apart(missing, jobs, data_dir, on_start)
    found = {outcome.cell.directory: outcome for outcome in ran}
    return [found.get(cell.directory) or CellOutcome(cell, done[cell.directory]) for cell in chosen]


def _here(
    missing: Sequence[Cell], data_dir: Path | str | None, on_start: Callable[[Cell], Listener]
) -> Iterator[CellOutcome]:
    for cell in missing:
        listen = on_start(cell)
        try:
            result = run(cell.recipe, cell.directory, resume=True, data_dir=data_dir, on_event=listen)
        except Exception as error:
            yield CellOutcome(cell, None, f"{type(error).__name__}: {error}")
            continue
        yield CellOutcome(cell, summary_of(result))


def _apart(
    missing: Sequence[Cell], jobs: int, data_dir: Path | str | None, on_start: Callable[[Cell], Listener]
) -> Iterator[CellOutcome]:
    """Run cells in worker processes, which send events and results through pipes."""
    context, queue = multiprocessing.get_context("spawn"), list(missing)
    workers: dict[Connection, Any] = {}
    running: dict[Connection, tuple[Cell, Listener]] = {}

    def give(worker: Connection) -> None:
        cell = queue.pop(0)
        running[worker] = cell, on_start(cell)
        worker.send((cell.recipe.tables, str(cell.directory)))

    try:
        while queue or running:
            while queue and len(running) < jobs:
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, data_dir), daemon=True)
                process.start()
                theirs.close()
                workers[ours] = process
                give(ours)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                cell, listen = running[ready]
                try:
                    kind, said = ready.recv()
                except EOFError:  # it was killed
                    workers[ready].join()
                    del running[ready]
                    yield CellOutcome(cell, None, f"its process ended with exit code {workers.pop(ready).exitcode}")
                    continue
                if kind == "event":
                    listen(said)
                    continue
                del running[ready]
                if queue:
                    give(ready)
                yield CellOutcome(cell, said) if kind == "done" else CellOutcome(cell, None, said)
    finally:
        for worker, process in workers.items():  # finished or interrupted; committed rounds are on disk
            process.terminate()
            process.join()
            worker.close()


def _work(parent: Connection, data_dir: Path | str | None) -> None:
    """Run the cells that the parent sends, and send it events and results, until the parent ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it too, and terminates this process

    def tell(kind: str, said: Any) -> None:
        parent.send((kind, said))

    try:
        while True:
            tables, directory = parent.recv()
            try:
                chosen = recipes.resolve(tables)
                result = run(
                    chosen, directory, resume=True, data_dir=data_dir, on_event=lambda event: tell("event", event)
                )
                said = "done", summary_of(result)
            except (BrokenPipeError, EOFError):
                raise
            except Exception as error:
                said = "failed", f"{type(error).__name__}: {error}"  # type: ignore[assignment]
            tell(*said)
    except (BrokenPipeError, EOFError, ConnectionResetError):  # the parent is gone
        return
