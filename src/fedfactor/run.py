"""A run directory: what a recipe left behind, and how it carries on.

```
recipe.toml     resolved: every default written out
task.json       what can be known without the data: classes, clients, who has what, the shape of an input
metrics.jsonl   one event a line, only appended to
checkpoint/     the last committed round: the server's tensors and the clients' states
kept/           rounds that the recipe asked to keep, with private states
trace.json      where the time went, if `--profile` was given
flower.json     on Flower: what the run is called on the nodes' disks, and who its clients are
summary.json    final and best accuracy, bytes, seconds, hashes, versions; written when the run is done
```
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import filelock
import torch
from torch import Tensor, nn

import fedfactor
from fedfactor.client import Setup, sections
from fedfactor.data import Dataset, counts, federated
from fedfactor.data import load as load_data
from fedfactor.engines import Engine, Inline
from fedfactor.evaluation import compare
from fedfactor.federation import Federation, Server
from fedfactor.plan import Tensors
from fedfactor.recipe import Recipe, Table, builder_of, read, resolve
from fedfactor.settings import Capacities, Reported, check_device_here
from fedfactor.simulation import Result
from fedfactor.states import Elsewhere, at_hand
from fedfactor.store import DiskStore, Journal
from fedfactor.task import FederatedData, Task
from fedfactor.wire import BadMessage, decode

Facts = dict[str, Any]
"""What `task.json` holds."""
Begin = Callable[[Recipe], tuple[Recipe, Task, Facts]]
"""Finds a recipe's task; what is only known now, of the clients' capacities say, goes into the recipe it returns."""


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
    begin: Begin | None = None,
) -> Result:
    """Run a recipe in a directory (or in memory), or carry on with what is there.

    `begin` takes the place of loading the recipe's data, once the directory is ours.
    """
    check_device_here(recipe.training.device)
    begin = begin or (lambda recipe: (recipe, *task_of(recipe, data_dir)))
    if directory is None:
        recipe, task, _ = begin(recipe)
        setup, engine = setup_of(recipe, task), engine or Inline()
        federation = Federation(setup, recipe.rounds, recipe.capacities, engine, on_event=on_event)
        return Result(federation, federation.run())
    directory = Path(directory)
    with locked(directory):
        check_claim(recipe, directory, resume)
        recipe, task, facts = begin(recipe)
        federation = Federation(
            setup_of(recipe, task),
            recipe.rounds,
            recipe.capacities,
            engine or Inline(),
            DiskStore(directory / "checkpoint", recipe.keep_rounds),
            Journal(directory / "metrics.jsonl"),
            on_event,
        )
        # Only now: a start that fails leaves the directory to the next one.
        _write(directory / "task.json", json.dumps(facts))
        _write(directory / "recipe.toml", recipe.to_toml())
        result = Result(federation, federation.run())
        _write(directory / "summary.json", json.dumps(summary(result), indent=1))
        return result


def finished(recipe: Recipe, directory: Path | str) -> dict[str, Any] | None:
    """Return the summary of a run of this recipe that is done; `None` if there is something left to run."""
    directory = Path(directory)
    check_claim(recipe, directory, resume=True)
    path = directory / "summary.json"
    if not path.exists() or not (directory / "checkpoint" / "current").exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found if found["rounds"] == recipe.rounds.rounds else None


@contextlib.contextmanager
def locked(directory: Path, name: str = "lock") -> Iterator[None]:
    """Make a directory and keep other processes from running in it."""
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
    """Check that a directory is free, or that what is there is being carried on unchanged."""
    path = directory / "recipe.toml"
    if not (directory / "checkpoint" / "current").exists():
        return  # nothing was ever committed
    if not path.exists():
        raise RunError(f"{directory} holds a run that has no recipe.toml; give another directory")
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


ENROLLED = "flower.json"
"""Where a run on Flower notes who its clients are."""


def reported(capacities: Capacities, directory: Path) -> Capacities:
    """Return capacities with those that the clients of a run said themselves, where it had such clients."""
    path = directory / ENROLLED
    said = json.loads(path.read_text())["start"].get("capacities", {}) if path.exists() else {}
    given = {int(client): float(capacity) for client, capacity in said.items()}
    return Reported(capacities.shares, capacities.dynamic, given) if given else capacities


def setup_of(recipe: Recipe, task: Task) -> Setup:
    """Return what server and clients of a recipe agree on."""
    return Setup(task, recipe.method, recipe.optimizer, recipe.codec, recipe.training)


def task_of(recipe: Recipe, data_dir: Path | str | None = None) -> tuple[Task, Facts]:
    """Load the data of a recipe, split it over the clients, and find its model; also what to know without the data."""
    tables = recipe.tables
    dataset = load_data(data_dir=data_dir, **tables["data"])
    data = federated(dataset, **tables["partition"])
    facts = facts_of(dataset, data)
    if data.train[1].dim() == 1:
        facts["examples"] = counts(data, dataset.classes, most=COUNTED).tolist()
    return task_with(recipe, data, facts), facts


def facts_of(dataset: Dataset, data: FederatedData) -> Facts:
    """Say what must be known of a task where its data is not at hand."""
    return {
        "kind": dataset.kind,
        "classes": dataset.classes,
        "class_names": dataset.class_names,
        "clients": data.clients,
        "input_shape": data.train[0].shape[1:],
        "input_dtype": str(data.train[0].dtype).removeprefix("torch."),
        "seen_shape": data.example.shape,
        "seen_dtype": str(data.example.dtype).removeprefix("torch."),
        "transform": str(data.transform),
    }


def task_with(recipe: Recipe, data: FederatedData, facts: Facts) -> Task:
    """Return a recipe's task on data that are there already."""
    return Task(model_factory(recipe.tables["model"], facts["classes"]), data, facts["kind"])


COUNTED = 200
"""Clients, at most, whose examples of each class are written down."""


def model_options(table: Table, classes: int) -> Table:
    """Return what a recipe's model is called with at full width."""
    options = {key: value for key, value in table.items() if key != "name"}
    parameters = inspect.signature(builder_of(table["name"])).parameters
    if "classes" in parameters:
        options.setdefault("classes", classes)
    if "width" in parameters:
        options.setdefault("width", 1.0)
    return options


def model_factory(table: Table, classes: int) -> Callable[..., nn.Module]:
    """Return what builds a recipe's model; it takes `width`, a share of the recipe's, where the model has one."""
    options, builder = model_options(table, classes), builder_of(table["name"])
    if "width" in inspect.signature(builder).parameters:
        full = options.pop("width")  # what a capacity of 1 has
        # Full width leaves what it is given alone: a `Multiple` counts channels, which a product would round anew.
        return lambda width=1.0: _built(
            table["name"], builder, {**options, "width": width if full == 1 else full * width}
        )
    return lambda: _built(table["name"], builder, options)


def _built(name: str, builder: Callable[..., Any], options: Table) -> nn.Module:
    found = builder(**options)
    if not isinstance(found, nn.Module):
        raise RunError(f"model {name!r} should build a torch.nn.Module, got a {type(found).__name__}")
    return found


class Absent(FederatedData):
    """The clients of a run whose data is not at hand: they can be counted, not asked."""

    def __init__(self, clients: int, example: Tensor) -> None:
        object.__setattr__(self, "_clients", clients)
        object.__setattr__(self, "_example", example)

    @property
    def example(self) -> Tensor:
        """An input of zeros, of the right shape and type."""
        return cast(Tensor, self.__dict__["_example"])

    @property
    def clients(self) -> int:
        """Number of clients in the population."""
        return int(self.__dict__["_clients"])


READS = 5
"""Tries to read from a directory that a running run is changing."""

Read = TypeVar("Read")


def load(directory: Path | str, round: int | None = None) -> Run:
    """Open a finished or running run: its recipe, its metrics as a table, its models; at its last commit or earlier.

    `round` is one of those that the recipe's `run.keep_rounds` kept.
    """
    return Run(directory, round)


class Run:
    """A finished or running run, opened for reading: nothing but the run directory is needed."""

    def __init__(self, directory: Path | str, round: int | None = None) -> None:
        self.directory = Path(directory)
        if not (self.directory / "recipe.toml").exists():
            raise RunError(f"{directory} is no run directory: it has no recipe.toml")
        self.recipe = resolve(read(self.directory / "recipe.toml"), str(self.directory / "recipe.toml"))
        if round is not None and round not in self.kept:
            there = ", ".join(map(str, self.kept)) or "none"
            raise RunError(
                f"round {round} of {directory} was not kept; kept rounds: {there} (the recipe lists them as "
                "run.keep_rounds; without a round the last commit is opened)"
            )
        self.round = round

    @property
    def kept(self) -> list[int]:
        """Rounds that were kept so far."""
        found = [path.name.removeprefix("round-") for path in (self.directory / "kept").glob("round-*")]
        return sorted(int(name) for name in found if name.isdigit())

    @property
    def task(self) -> dict[str, Any]:
        """What was learnt: kind, classes, clients, the shape of an input and what is done to it."""
        path = self.directory / "task.json"
        if not path.exists():
            raise RunError(f"{self.directory} has no task.json: the run has not started yet")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All events so far, of a kept round those up to it; a last line that was cut short is left out."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        events = []
        for number, line in enumerate(lines):
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                if number != len(lines) - 1:
                    raise RunError(f"{path}, line {number + 1}, is not JSON") from None
        return events if self.round is None else events[: self._last(self._store())[1]["events"]]

    def table(self) -> dict[str, list[Any]]:
        """Return the rounds as columns (`global.1.accuracy`, `totals.bytes_up`, ...): what a data frame takes."""
        rows = [flat(event) for event in self.metrics if event["event"] == "round"]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def against(self, other: Run | Path | str, **how: Any) -> dict[str, Any]:
        """Say how many clients win and lose against another run, Local or FedAvg say: see `evaluation.compare`."""
        theirs = other if isinstance(other, Run) else Run(other)
        return compare(self.metrics, theirs.metrics, **how)

    @property
    def summary(self) -> dict[str, Any] | None:
        """What the finished run wrote; `None` while it runs."""
        path = self.directory / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None

    def model(self, capacity: float | None = None, client: int | None = None) -> nn.Module:
        """Return the server's model (at a capacity), or a client's own, as a plain module on the CPU."""
        facts = self.task
        if client is not None and not 0 <= client < facts["clients"]:
            raise RunError(f"there is no client {client}: the run has {facts['clients']}, counted from 0")
        if capacity is not None and not 0 < capacity <= 1:
            raise RunError(f"a capacity lies in (0, 1], got {capacity:g}")
        task = self.task_without_data()

        def read() -> nn.Module:
            result = self._rebuilt(task)
            federation, server = result.federation, result.server
            who = None if client is None else federation.participant(client, server.round)
            level = who.capacity if who else capacity or federation.capacities.levels[0]
            if self.recipe.method.calibrates and level not in server.statistics:
                raise RunError(
                    f"norm statistics at capacity {level:g} were not gathered in round {server.round}; with the data "
                    "at hand, result() gathers them"
                )
            return result.model_at(level) if client is None else result.client_model(client)

        return self._steady(read)

    def task_without_data(self) -> Task:
        """Return the task with clients that can be counted, not asked."""
        facts = self.task
        if "seen_shape" not in facts:
            raise RunError(
                f"{self.directory / 'task.json'} does not say what a model sees: an earlier version wrote it; with the "
                "data at hand, result() needs no such word"
            )
        example = torch.zeros(facts["seen_shape"], dtype=getattr(torch, facts["seen_dtype"]))
        return task_with(self.recipe, Absent(facts["clients"], example), facts)

    def server(self) -> Tensors:
        """Return the server's tensors."""
        return self._steady(lambda: Server.from_bytes(*self._last(self._store())).tensors)

    def clients(self) -> list[int]:
        """Return the clients that hold a state."""
        return self._steady(lambda: self._store().clients("client"))

    def private(self, client: int) -> dict[str, Tensors]:
        """Return what a client holds: `kept` are its private tensors, `optimizer` and `codec` what those keep on it.

        Empty if it holds nothing.
        """
        state = self._steady(lambda: self._store().read("client", client))
        try:
            return sections(decode(at_hand(state)).tensors) if state else {}
        except Elsewhere as error:
            raise RunError(f"client {client}: {error}") from None
        except BadMessage as error:
            raise RunError(f"the state of client {client} in {self.directory} is damaged: {error}") from None

    def result(self, data_dir: Path | str | None = None) -> Result:
        """Load the data too and rebuild the federation, to measure again."""
        return self.rebuilt(task_of(self.recipe, data_dir)[0])

    def rebuilt(self, task: Task, device: str = "cpu") -> Result:
        """Rebuild the federation around a task that is loaded already."""
        return self._steady(lambda: self._rebuilt(task, device))

    def _rebuilt(self, task: Task, device: str = "cpu") -> Result:
        store = self._store()
        data, info = self._last(store)
        # Wherever it was trained, it is looked at here.
        recipe = dataclasses.replace(self.recipe, training=dataclasses.replace(self.recipe.training, device=device))
        capacities = reported(recipe.capacities, self.directory)
        federation = Federation(setup_of(recipe, task), recipe.rounds, capacities, store=store)
        federation.journal.events = self.metrics[: info["events"]]
        return Result(federation, Server.from_bytes(data, info))

    def _store(self) -> DiskStore:
        folder = "checkpoint" if self.round is None else f"kept/round-{self.round}"
        return DiskStore(self.directory / folder, writing=False)

    def _last(self, store: DiskStore) -> tuple[bytes, dict[str, Any]]:
        last = store.last()
        if last is None:
            raise RunError(f"{self.directory} has no committed round yet")
        return last

    def _steady(self, read: Callable[[], Read]) -> Read:
        for _ in range(READS - 1):
            try:
                return read()
            except FileNotFoundError:  # a running run has just replaced what we were about to read
                time.sleep(0.1)
        return read()

    def __repr__(self) -> str:
        at = "" if self.round is None else f", round {self.round}"
        return f"Run({str(self.directory)!r}{at}, {self.recipe.method}, {len(self.metrics)} events)"


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten tables within tables: `{"totals": {"macs": 1}}` becomes `{"totals.macs": 1}`."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
