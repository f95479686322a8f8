"""Read run directories for the report, reducing the events of each run to series while reading."""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfactor.runs.directory import RunError
from fedfactor.runs.open import steady
from fedfactor.runs.recipe import read as read_recipe
from fedfactor.server.clock import PHASES
from fedfactor.server.store import read_checkpoint
from fedfactor.task import ACCURACY, Decider

MEASURED = {
    "all": "all clients on their own test data",
    "global": "the server's model on the central test set",
    "selected_after": "the round's clients on their own test data, after training",
    "selected_before": "the round's clients on their own test data, before training",
}
"""All measurements. A comparison uses the first one that all runs have."""

Point = tuple[int, float]
Series = Callable[["RunData"], Sequence[Point]]


def lists() -> defaultdict[str, list[Point]]:
    """Return an empty set of named series."""
    return defaultdict(list)


@dataclass
class RunData:
    """What the report shows of one run. A series is a list of (round, value)."""

    directory: Path
    name: str
    tables: Mapping[str, Any]
    recipe: str
    """The text of the resolved recipe."""
    task: Mapping[str, Any]
    protocol: Mapping[str, Any] = field(default_factory=dict)
    dense_bytes: float = 0.0
    """Bytes that a client moves per round with plain FedAvg; 0 if the run does not say."""
    last_round: int = 0
    decider: Decider = ACCURACY
    """The metric by which the run's models are compared."""
    scores: dict[str, list[Point]] = field(default_factory=lists)
    """The deciding metric by measurement."""
    others: dict[str, dict[str, list[Point]]] = field(default_factory=lambda: defaultdict(lists))
    """All other metrics: by measurement, then by name."""
    trained: set[float] = field(default_factory=set)
    """The capacities that clients have really trained."""
    by_level: dict[str, list[Point]] = field(default_factory=lists)
    """The deciding metric of the server's model by capacity."""
    clients: dict[str, tuple[int, dict[int, float]]] = field(default_factory=dict)
    """By measurement: the round with the best mean, and the deciding metric of each client in that round."""
    totals: dict[str, list[Point]] = field(default_factory=lists)
    """Sums since the first round: bytes, macs, dense (bytes of plain FedAvg), seconds, joules, `2 Mbps` etc., and
    simulated_seconds and simulated_joules of a virtual clock."""
    privacy: Mapping[str, Any] = field(default_factory=dict)
    """Settings of differential privacy, if the run has it; what it spent is in `totals` as epsilon."""
    timeline: Mapping[str, Any] = field(default_factory=dict)
    """The virtual clock of the last round, if the run has a fleet."""
    devices: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By kind of device: clients asked, clients by outcome, and sums of seconds by what they do in a round."""
    failures: list[tuple[int, int, str]] = field(default_factory=list)
    """Round, client, reason."""
    observed: dict[str, dict[str, list[Point]]] = field(default_factory=lambda: defaultdict(lists))
    """Numbers that the method records: by name, then by layer ("" if there is one number per round)."""
    gram: dict[str, list[list[float]]] = field(default_factory=dict)
    """By layer, of the last round that has it."""
    mean_abs_u: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """By layer and width, of the last round that has it."""
    matrices_round: int = 0
    """The round of `gram` and `mean_abs_u`."""
    picks: dict[str, list[int]] = field(default_factory=dict)
    """By layer: how often each kernel was sent to a client."""
    picking_clients: int = 0
    """How many clients were sent kernels, summed over rounds."""

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.tables.get("method", {}).get("name", "?"))

    @property
    def seed(self) -> tuple[Any, Any]:
        """The seeds of training and of the partition."""
        return self.tables.get("train", {}).get("seed", 0), self.tables.get("partition", {}).get("seed", 0)

    @property
    def rounds(self) -> int:
        """How many rounds the recipe asks for."""
        return int(self.tables.get("train", {}).get("rounds", self.last_round))

    def add(self, event: Mapping[str, Any]) -> None:
        """Add one event of metrics.jsonl."""
        if event["event"] == "start":
            self.protocol, self.dense_bytes = event["protocol"], event.get("dense_bytes", 0)
            self.decider, self.privacy = Decider.read(event), event.get("privacy", {})
        elif event["event"] == "round":
            self._add_round(event)
        self.failures += [(event["round"], one["client"], one["reason"]) for one in event.get("failures", ())]

    def _add_round(self, event: Mapping[str, Any]) -> None:
        now = self.last_round = event["round"]
        cost = {"seconds": event["seconds"], "dense": self.dense_bytes * len(event["cohort"])}
        cost |= {f"{mbps} Mbps": seconds for mbps, seconds in event.get("link_seconds", {}).items()}
        cost |= {"joules": event["joules"]} if "joules" in event else {}
        for key, value in cost.items():
            series = self.totals[key]
            series.append((now, value + (series[-1][1] if series else 0.0)))
        totals = event["totals"]
        self.totals["bytes"].append((now, totals["bytes_up"] + totals["bytes_down"]))
        if totals["macs"] is not None:
            self.totals["macs"].append((now, totals["macs"]))
        for key in totals.keys() & {"simulated_seconds", "simulated_joules"}:
            self.totals[key].append((now, totals[key]))
        if (epsilon := event.get("privacy", {}).get("epsilon")) is not None:
            self.totals["epsilon"].append((now, epsilon))
        if "clock" in event:
            self._add_clock(event["clock"])
        self.trained |= set(event.get("trained_capacities", ()))
        for level, scores in event.get("global", {}).items():
            self.by_level[level].append((now, scores[self.decider.name]))
        for key in MEASURED:
            if key in event:
                self._add_scores(key, now, event[key])
        for name, found in event.get("observed", {}).items():
            self._add_observed(name, now, found, len(event["cohort"]) - len(event["failures"]))

    def _add_clock(self, clock: Mapping[str, Any]) -> None:
        self.timeline = clock
        for place, device in enumerate(clock["devices"]):
            seconds = {phase: clock[phase][place] for phase in PHASES}
            self.devices[device].update({"asked": 1, clock["outcomes"][place]: 1, **seconds})

    def _add_scores(self, key: str, now: int, scores: Mapping[str, Any]) -> None:
        metrics, series, goodness = self.decider.metrics(scores), self.scores[key], self.decider.goodness
        value = metrics.pop(self.decider.name)
        if "who" in scores and goodness(value) > max((goodness(one) for _, one in series), default=-math.inf):
            self.clients[key] = now, dict(zip(scores["who"], scores["each"], strict=True))
        series.append((now, value))
        for name, other in metrics.items():
            self.others[key][name].append((now, other))

    def _add_observed(self, name: str, now: int, found: Any, clients: int) -> None:
        if name == "picks":
            for layer, counts in found.items():
                before = self.picks.get(layer, [0] * len(counts))
                self.picks[layer] = [a + b for a, b in zip(before, counts, strict=True)]
            self.picking_clients += clients
        elif name in ("gram", "mean_abs_u"):
            setattr(self, name, found)
            self.matrices_round = now
        else:
            for layer, value in (found if isinstance(found, Mapping) else {"": found}).items():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    self.observed[name][layer].append((now, value))


def measured(key: str) -> Series:
    """Return a function from a run to the series of a measurement."""
    return lambda run: run.scores.get(key, [])


def summed(key: str) -> Series:
    """Return a function from a run to the series of a cost."""
    return lambda run: run.totals.get(key, [])


def recorded(name: str) -> Series:
    """Return a function from a run to the series of a number that the method records once per round."""
    return lambda run: run.observed.get(name, {}).get("", [])


def last(series: Series) -> Callable[[RunData], float | None]:
    """Return a function from a run to the last value of a series."""
    return lambda run: points[-1][1] if (points := series(run)) else None


def best(series: Series) -> Callable[[RunData], float | None]:
    """Return a function from a run to the best value of a series of the deciding metric."""
    return lambda run: max((value for _, value in series(run)), key=run.decider.goodness, default=None)


def first_shared(keys: Iterable[str], runs: Sequence[RunData], has: Callable[[RunData, str], object]) -> str | None:
    """Return the first key that all runs have, else the first that any run has."""
    there = [key for key in keys if any(has(run, key) for run in runs)]
    return next((key for key in there if all(has(run, key) for run in runs)), next(iter(there), None))


def read_runs(directories: Iterable[Path]) -> list[RunData]:
    """Read runs. The name of each is its path without the leading folders that all share."""
    paths = [one.resolve() for one in directories]
    shared = os.path.commonpath([path.parent for path in paths])
    return [read_run(path, path.relative_to(shared).as_posix()) for path in paths]


def read_run(directory: Path, name: str) -> RunData:
    """Read one run, finished or not."""
    path, task, recipe = (directory / one for one in ("metrics.jsonl", "task.json", "recipe.toml"))
    facts = json.loads(task.read_text(encoding="utf-8")) if task.exists() else {}
    found = RunData(directory, name, read_recipe(recipe), recipe.read_text(encoding="utf-8"), facts)
    steady(lambda: read_checkpoint(directory / "checkpoint"))  # raises Damaged if its hash is wrong
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            found.add(json.loads(line))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, json.JSONDecodeError) and number == len(lines):
                break  # the process was killed while it wrote this line
            raise RunError(f"{path}, line {number}, is not an event of a run ({error!r})") from None
    return found
