"""Opening a run directory for reading."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fedfactor.engines import Inline
from fedfactor.protocol.coding import sections
from fedfactor.protocol.message import Bytes, decode
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.settings import Reported
from fedfactor.protocol.states import Elsewhere, at_hand
from fedfactor.registry import imported
from fedfactor.runs.directory import ENROLLED, RunError, find_runs, read_summary, reported
from fedfactor.runs.flower.device import own_task
from fedfactor.runs.peft import started
from fedfactor.runs.recipe import recorded
from fedfactor.runs.tasks import data_without, setup_of, task_of, task_with
from fedfactor.server.events import client_gains
from fedfactor.server.federation import Federation
from fedfactor.server.result import Result
from fedfactor.server.state import Server
from fedfactor.server.store import DiskStore, read_checkpoint
from fedfactor.task import Task

READS = 5
"""Attempts to read from a directory that a running process is changing."""

Read = TypeVar("Read")
Model = nn.Module | Callable[..., nn.Module]


def load(
    directory: Path | str, round: int | None = None, *, model: Model | str | None = None
) -> Run | Any:  # Any: a type checker cannot know which
    """Open a run directory as `Run`, or a folder that contains some, such as a sweep or a comparison, as `Runs`.

    A run has its recipe, its metrics as a table and its models. It may still be running.

    Args:
        directory: The run directory, or a folder that contains some.
        round: The round to open, which must be listed in the recipe's `run.keep_rounds`. None: the last committed one.
        model: The network of a run that was started by `simulate`, as it was given there, or the name of a function
            that builds it, `package.module:function`. Only models need it.

    Raises:
        RunError: The directory is no run directory and contains none, or a run has no such round.
        Damaged: A file of a checkpoint is not what the run has written.
    """
    kind = Run if (Path(directory) / "recipe.toml").exists() else Runs
    return kind(directory, round, model)


class Run:
    """A finished or running run, opened for reading. Only the run directory is needed, not the data."""

    def __init__(self, directory: Path | str, round: int | None = None, model: Model | str | None = None) -> None:
        self.directory = Path(directory)
        if not (self.directory / "recipe.toml").exists():
            raise RunError(f"{directory} is not a run directory: it has no recipe.toml")
        self.recipe = recorded(self.directory / "recipe.toml")
        if model is not None and not self.recipe.from_python:
            raise RunError(f"the recipe of {directory} names its model; leave out the model")
        self.given_model: Model | None = imported(model) if isinstance(model, str) else model
        self._given_name = model if isinstance(model, str) else ""
        if round is not None and round not in self.kept:
            there = ", ".join(map(str, self.kept)) or "none"
            raise RunError(
                f"round {round} of {directory} was not kept; kept rounds: {there}. Only rounds listed in "
                "run.keep_rounds are kept; without a round, the last commit is opened"
            )
        self.round = round
        steady(lambda: read_checkpoint(self._folder))  # raises Damaged if its hash is wrong

    @property
    def model_name(self) -> str:
        """The name of the model in the recipe, or of the given Python object."""
        if not self.recipe.from_python:
            return str(self.recipe.tables["model"]["name"])
        return self._given_name or str(getattr(self.given_model, "__qualname__", type(self.given_model).__name__))

    @property
    def kept(self) -> list[int]:
        """The rounds that have been kept so far."""
        found = [path.name.removeprefix("round-") for path in (self.directory / "kept").glob("round-*")]
        return sorted(int(name) for name in found if name.isdigit())

    @property
    def task(self) -> dict[str, Any]:
        """Facts about the task: kind, classes, number of clients, shape of an input and its transform."""
        path = self.directory / "task.json"
        if not path.exists():
            raise RunError(f"{self.directory} has no task.json: the run has not started yet")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    @property
    def owner(self) -> int | None:
        """The only client whose model the directory has, if the client's own device wrote it; otherwise `None`."""
        found = self._owner().get("client")
        return None if found is None else int(found)

    def _owner(self) -> dict[str, Any]:
        path = self.directory / ENROLLED
        found: dict[str, Any] = json.loads(path.read_text()).get("owner", {}) if path.exists() else {}
        return found

    def meant_client(self, client: int | None) -> int | None:
        """Return the client whose model is meant. Raise RunError if the directory does not have it."""
        owner, clients = self.owner, self.task["clients"]
        if client is not None and not 0 <= client < clients:
            raise RunError(f"there is no client {client}: the run has {clients}, counted from 0")
        if owner is not None and client not in (None, owner):
            raise RunError(f"{self.directory} has the model of client {owner} only, not of client {client}")
        return client if owner is None else owner

    def loaded_task(self, data_dir: Path | str | None = None) -> tuple[Task, dict[str, Any]]:
        """Load the run's data and return the task, with its facts; on a node with its own data, load those."""
        own = {key: value for key, value in self._owner().items() if key != "client"}
        return own_task(self.recipe, **own) if own else task_of(self.recipe, data_dir)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All events so far, or up to the opened round; an incomplete last line is ignored."""
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
        """Return the rounds as columns (`global.1.accuracy`, `totals.bytes_up`, ...), ready for a data frame."""
        rows = [flat(event) for event in self.metrics if event["event"] == "round"]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def against(self, other: Run | Path | str, **how: Any) -> dict[str, Any]:
        """Compare each client's accuracy with another run, such as Local: see `server.events.client_gains`."""
        theirs = other if isinstance(other, Run) else Run(other)
        return client_gains(self.metrics, theirs.metrics, **how)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The contents of `summary.json`, or `None` if the run is not finished."""
        return read_summary(self.directory)

    def model(self, capacity: float | None = None, client: int | None = None) -> nn.Module:
        """Return the server's model (at a capacity), or a client's own, as a plain module on the CPU."""
        client = self.meant_client(client)
        if capacity is not None and not 0 < capacity <= 1:
            raise RunError(f"a capacity lies in (0, 1], got {capacity:g}")
        task = self.task_without_data()

        def read() -> nn.Module:
            result = self._rebuilt(task)
            federation, server = result.federation, result.server
            who = None if client is None else federation.dispatch.participant(client, server.round)
            level = who.capacity if who else capacity or federation.capacities.levels[0]
            if who and self.recipe.training.own_norms:
                raise RunError("train.own_norms: norm statistics come from a client's own data; call result(data_dir)")
            if self.recipe.method.traits.calibrates and level not in server.statistics:
                raise RunError(
                    f"norm statistics at capacity {level:g} were not estimated in round {server.round}; estimate them "
                    "with the data: call result(data_dir)"
                )
            return result.model_at(level) if client is None else result.client_model(client)

        return steady(read)

    def task_without_data(self) -> Task:
        """Return the task with the right number of clients, but without their data."""
        facts = self.task
        if "seen_shape" not in facts:
            raise RunError(
                f"{self.directory / 'task.json'} was written by an earlier version and lacks the shape of the model's "
                "inputs; call result(data_dir) instead, which loads the data"
            )
        data = data_without(facts)
        if not self.recipe.from_python:
            return task_with(self.recipe, data, facts)
        if self.given_model is None:
            raise RunError(
                f"{self.directory} was started from Python, so it does not record its model: give the model with "
                "load(DIR, model=...), or with --model package.module:function on the command line"
            )
        size = self.recipe.rounds.evaluate_batch_size
        tune = self.recipe.tune
        return Task(started(self.given_model, tune), data, facts["kind"], size, tune=tune)

    def server(self) -> Tensors:
        """Return the server's tensors."""
        return steady(lambda: Server.from_bytes(*self._last(self._store())).tensors)

    def clients(self) -> list[int]:
        """Return the clients that have a state."""
        return steady(lambda: self._store().clients("client"))

    def private(self, client: int) -> dict[str, Tensors]:
        """Return a client's state: its private tensors (`kept`) and the states of `optimizer` and `codec`.

        With a method that moves the base, `moved` is the sum of the moves. Empty if the client has no state.
        """
        state = steady(lambda: self._store().read("client", client))
        try:
            return sections(decode(at_hand(state)).tensors) if state else {}
        except Elsewhere as error:
            raise RunError(f"client {client}: {error}") from None

    def result(self, data_dir: Path | str | None = None) -> Result:
        """Load the data and rebuild the federation, for example to evaluate again."""
        return self.rebuilt(self.loaded_task(data_dir)[0])

    def rebuilt(self, task: Task, device: str = "cpu") -> Result:
        """Rebuild the federation with a task that is already loaded."""
        return steady(lambda: self._rebuilt(task, device))

    def _rebuilt(self, task: Task, device: str = "cpu") -> Result:
        store = self._store()
        data, info = self._last(store)
        # Use this device, whatever device the run was trained on.
        recipe = dataclasses.replace(self.recipe, training=dataclasses.replace(self.recipe.training, device=device))
        capacities = reported(recipe.capacities, self.directory)
        fitted = next(iter(self.metrics), {}).get("fleet", {}).get("capacities")
        if fitted:
            capacities = Reported(capacities.shares, given=dict(enumerate(fitted)))
        federation = Federation(setup_of(recipe, task), recipe.rounds, Inline(), capacities, store)
        model = federation.settings()["model"]
        if info["settings"].get("model", model) != model:
            raise RunError(f"the model has other tensors than the model of {self.directory}")
        base = self.task.get("base_sha256", "")
        if base != federation.setup.base_sha256:
            raise RunError(
                f"the frozen base of the model has the SHA-256 {federation.setup.base_sha256 or 'of no base'}, but "
                f"{self.directory} was trained on {base or 'a model without frozen parameters'}: use the same weights"
            )
        federation.journal.events = self.metrics[: info["events"]]
        return Result(federation, Server.from_bytes(data, info))

    @property
    def _folder(self) -> Path:
        return self.directory / ("checkpoint" if self.round is None else f"kept/round-{self.round}")

    def _store(self) -> DiskStore:
        return DiskStore(self._folder, writing=False)

    def _last(self, store: DiskStore) -> tuple[Bytes, dict[str, Any]]:
        last = store.last()
        if last is None:
            raise RunError(f"{self.directory} has no committed round yet")
        return last

    def __repr__(self) -> str:
        at = "" if self.round is None else f", round {self.round}"
        return f"Run({str(self.directory)!r}{at}, {self.recipe.method}, {len(self.metrics)} events)"


class Runs(Mapping[str, Run]):
    """The runs below a folder, by their path in it: `runs["fedpara/seed-1"].model()`."""

    def __init__(self, folder: Path | str, round: int | None = None, model: Model | str | None = None) -> None:
        self.folder = Path(folder)
        self._runs = {path.relative_to(folder).as_posix(): Run(path, round, model) for path in find_runs([folder])}

    def __getitem__(self, name: str) -> Run:
        return self._runs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def table(self) -> dict[str, list[Any]]:
        """Return columns with one value per run, ready for a data frame.

        They are its name (`run`), the method, the settings in which the runs differ (`train.seed`, ...) and the figures
        of its summary (`final_accuracy`, `bytes_up`, `measured.global.at.0.5`, ...), which are `None` until the run is
        finished.
        """
        settings = [flat(run.recipe.tables) for run in self.values()]
        summaries = [flat(run.summary or {}) for run in self.values()]
        figures = dict.fromkeys(key for summary in summaries for key in summary)
        found: dict[str, list[Any]] = {"run": list(self)}
        found |= {key: [one.get(key) for one in settings] for key in dict.fromkeys(["method.name", *varied(settings)])}
        return found | {key: [one.get(key) for one in summaries] for key in figures}

    def __repr__(self) -> str:
        return f"Runs({str(self.folder)!r}: {', '.join(self)})"


def varied(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values are not the same in all settings."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({json.dumps(one.get(key), default=str) for one in settings}) > 1]


def steady(read: Callable[[], Read]) -> Read:
    """Return what `read` returns. It is called again if a running process has just replaced a file that it reads."""
    for _ in range(READS - 1):
        try:
            return read()
        except FileNotFoundError:
            time.sleep(0.1)
    return read()


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables: `{"totals": {"macs": 1}}` becomes `{"totals.macs": 1}`."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
