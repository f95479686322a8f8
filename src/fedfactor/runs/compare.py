"""Compare methods over seeds: run the missing cells and resume interrupted ones.

Each cell has its own run directory, `DIR/METHOD/seed-N`. For one seed, all methods have the same partition and the same
cohorts, because both depend on the recipe and the seed only; a comparison in which they would differ is refused. Each
seed has its own partition, so that intervals include the variance of the split; a setting of `partition.seed` fixes it.
"""

from __future__ import annotations

import fnmatch
import json
import multiprocessing
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fedfactor.registry import create
from fedfactor.runs import recipe as recipes
from fedfactor.runs.directory import TUNED, diverged, finished
from fedfactor.runs.execute import run
from fedfactor.runs.recipe import RecipeError
from fedfactor.runs.tuning import (
    FILE,
    SHARE,
    Candidate,
    Search,
    Settings,
    Tuning,
    directory_name,
    grid,
    key_of,
    split_settings,
    written,
)
from fedfactor.server.result import RANKING
from fedfactor.support.files import write_atomically
from fedfactor.task import Decider

METRICS = ("evaluate.metrics", "evaluate.best", "evaluate.higher_is_better")
SAME = ("data", "partition", "capacities", "train.rounds", "train.cohort", "train.seed", "fleet.devices", *METRICS)
"""Settings that must be equal for all methods: which client has which data and device, the cohorts, and what is
measured."""


@dataclass(frozen=True)
class Cell:
    """One run of a comparison or of a sweep. Cells with the same label differ in their seeds only."""

    label: str
    """A method, a method and its variant (`fedpara@wide`), or the name of a sweep's cell without its seed."""
    recipe: recipes.Recipe
    directory: Path

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.recipe.tables["method"]["name"])

    @property
    def seed(self) -> int:
        """The seed of training."""
        return self.recipe.training.seed

    @property
    def name(self) -> str:
        """Label and seed, for messages."""
        return f"{self.label}, seed {self.seed}"


@dataclass(frozen=True)
class CellOutcome:
    """The summary of a finished cell, or why it failed."""

    cell: Cell
    summary: Mapping[str, Any] | None
    failure: str = ""
    tuning: Tuning | None = None
    """How the settings of the method were chosen, if they were tuned."""


def cells(
    tables: recipes.Table,
    methods: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    *,
    settings: Sequence[str] = (),
    only: str = "*",
    where: str = "recipe",
    tuned: Mapping[str, Settings] | None = None,
) -> list[Cell]:
    """Return all cells of a comparison, resolved and checked before anything runs.

    If the recipe, or a cell of its sweep, names a method, that method takes its settings from there; other methods have
    their defaults.

    Args:
        tables: The recipe.
        methods: Names of methods. `METHOD@VARIANT` is the same method once more, to be given settings of its own.
        seeds: Seeds of training and of the partition.
        folder: The directory of all runs.
        settings: `section.key=value` for all methods, or `METHOD:section.key=value` for one of `methods`. If
            `partition.seed` is among them, all seeds share that partition.
        only: Pattern of the names of the sweep's cells from which methods take their settings.
        where: The name of the recipe in errors.
        tuned: Settings by label that override all others.
    """
    for name, given in (("methods", methods), ("seeds", seeds)):
        if not given or len(set(given)) != len(given):
            raise RecipeError(f"a comparison needs at least one of {name}, without repetitions; got {list(given)}")
    for label in methods:
        create("methods", _method_in(label))  # an unknown name raises an error that lists the methods
    shared, own = split_settings(methods, settings)
    bases = {label: _tables_of(tables, _method_in(label), shared, only, where) for label in methods}
    found = []
    for seed in seeds:
        row = []
        for label in methods:
            chosen = recipes.override(bases[label], own[label])
            for key, value in (tuned or {}).get(label, {}).items():
                chosen = recipes.merged(chosen, recipes.nested(key, value))
            chosen["train"] = {key: value for key, value in chosen.get("train", {}).items() if key != "seed"}
            if not any(key_of(assignment) == "partition.seed" for assignment in (*shared, *own[label])):
                chosen["partition"] = {**chosen.get("partition", {}), "seed": seed}
            resolved = recipes.resolve({**chosen, "seed": seed}, f"{where} ({label}, seed {seed})")
            row.append(Cell(label, resolved, folder / label / f"seed-{seed}"))
        _check_same(row)
        found += row
    return found


def sweep_cell(name: str, recipe: recipes.Recipe, directory: Path) -> Cell:
    """Return a cell of a sweep, labelled so that cells which differ in their seeds only have the same label."""
    unseeded = re.sub(r"(^|-)seed=-?\d+(?=-|$)", "", name).strip("-")
    return Cell(unseeded or recipe.tables["name"], recipe, directory)


def _method_in(label: str) -> str:
    """Return the method of a label such as `fedpara@wide`. Raise RecipeError if the variant cannot name a directory."""
    method, at, variant = label.partition("@")
    if at and not re.fullmatch(r"[\w.=+-]+", variant):
        raise RecipeError(f"a variant is written METHOD@NAME, such as fedpara@wide, got {label!r}")
    return method


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
                    f"{row[0].label} and {cell.label} cannot be compared: {key} is {theirs!r} and {ours!r}. Set one "
                    f"value for both with --set {key}=..."
                )


def _at(tables: recipes.Table, key: str) -> Any:
    for part in key.split("."):
        tables = tables.get(part, {})  # a recipe need not have a fleet
    return tables


# Running.

Listener = Callable[[dict[str, Any]], None]


def compare(
    tables: recipes.Table,
    methods: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    *,
    search: Search | None = None,
    settings: Sequence[str] = (),
    only: str = "*",
    where: str = "recipe",
    **running: Any,
) -> list[CellOutcome]:
    """Run the missing cells of a comparison, after tuning the methods if `search` says so.

    A method whose tuning fails does not affect the others: its cells are not run, and their outcomes say why.

    Args:
        tables, methods, seeds, folder, settings, only, where: See `cells`.
        search: Which values to try. Tuning uses the first seed, and its runs are in the folder `tuning`.
        running: Arguments of `run_cells`.
    """

    def build(tuned: Mapping[str, Settings], seeds: Sequence[int] = seeds) -> list[Cell]:
        return cells(tables, methods, seeds, folder, settings=settings, only=only, where=where, tuned=tuned)

    def run_some(chosen: Sequence[Cell]) -> list[CellOutcome]:
        return run_cells(chosen, **running)

    plain, search = build({}), search or Search()
    candidates = grid(methods, search.tune, settings, SAME)
    if not candidates:
        return run_some(plain)
    tunings = _tunings(plain, candidates, search, build, run_some, folder / "tuning")
    final = build({label: one.chosen.settings for label, one in tunings.items() if not one.failure})
    failures = {label: one.failure for label, one in tunings.items() if one.failure}
    ran = {one.cell.directory: one for one in run_some([cell for cell in final if cell.label not in failures])}
    outcomes = []
    for cell in final:
        outcome = ran.get(cell.directory) or CellOutcome(cell, None, failures[cell.label])
        tuning = tunings.get(cell.label)
        if tuning and outcome.summary is not None:
            write_atomically(cell.directory / FILE, json.dumps(tuning.as_dict(), indent=1))
        outcomes.append(replace(outcome, tuning=tuning))
    return outcomes


def ranking(summaries: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the measurement by which runs are ranked: the first that all of them have."""
    return next((key for key in RANKING if summaries and all(key in one["measured"] for one in summaries)), None)


def _tunings(
    plain: Sequence[Cell],
    candidates: Mapping[str, Sequence[Settings]],
    search: Search,
    build: Callable[[Mapping[str, Settings], Sequence[int]], list[Cell]],
    run_some: Callable[[Sequence[Cell]], list[CellOutcome]],
    folder: Path,
) -> dict[str, Tuning]:
    """Run all candidates with the first seed, and return by label what was tried and how well it did.

    Candidates are compared by the measurement by which the comparison will rank the methods. It depends on all methods,
    so those that are not tuned are run first.
    """
    first = plain[0]
    rounds = first.recipe.rounds.rounds if search.rounds is None else search.rounds
    share = search.share or first.recipe.tables["partition"]["validation_share"] or SHARE
    how = {"train.rounds": rounds, "partition.validation_share": share, "partition.evaluate_on": "validation"}
    trials: dict[Path, tuple[str, Settings, Cell]] = {}
    for place in range(max(map(len, candidates.values()))):
        tried = {label: some[place] for label, some in candidates.items() if place < len(some)}
        tuned = {cell.label: {**tried.get(cell.label, {}), **how, "run.keep_rounds": []} for cell in plain}
        for cell in build(tuned, [first.seed]):
            if cell.label in tried:
                settings = tried[cell.label]
                where = folder / cell.label / directory_name(settings)
                label = f"tuning {cell.label}, {written(settings)}"
                trials[where] = cell.label, settings, Cell(label, cell.recipe, where)
    ran = run_some([cell for cell in plain if cell.label not in candidates])
    if not (folder / TUNED).exists():  # before there are runs, which nobody may mistake for results
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / TUNED, "{}")
    ran += run_some([cell for *_, cell in trials.values() if diverged(cell.recipe, cell.directory) is None])
    summaries = {one.cell.directory: one.summary for one in ran if one.summary is not None}
    failures = {one.cell.directory: one.failure for one in ran}
    common, tunings = ranking(list(summaries.values())), dict[str, Tuning]()
    for label in candidates:
        mine = {where: trial for where, trial in trials.items() if trial[0] == label}
        measured = common or ranking([summaries[where] for where in mine if where in summaries])
        results = []
        for where, (_, settings, cell) in mine.items():
            score = summaries[where]["measured"][measured]["final"] if where in summaries and measured else None
            lost = diverged(cell.recipe, where)
            failure = lost or failures.get(where) or ("" if measured else "its run measured no scores")
            results.append(Candidate(settings, score, lost is not None, failure))
        decider = Decider.read(next(iter(summaries.values()), {}))
        tunings[label] = Tuning(measured or "", rounds, first.seed, share, tuple(results), decider)
    write_atomically(folder / TUNED, json.dumps({label: one.as_dict() for label, one in tunings.items()}, indent=1))
    return tunings


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
        yield CellOutcome(cell, result.summary)


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
                said = "done", result.summary
            except (BrokenPipeError, EOFError):
                raise
            except Exception as error:
                said = "failed", f"{type(error).__name__}: {error}"  # type: ignore[assignment]
            tell(*said)
    except (BrokenPipeError, EOFError, ConnectionResetError):  # the parent is gone
        return
