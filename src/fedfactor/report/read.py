"""Run directories, read for the report: what they measured and cost, reduced while it is read."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfactor.runs.directory import RunError
from fedfactor.runs.recipe import read as read_recipe

MEASURED = {
    "all": "all clients on their own test data",
    "global": "the server's model on the central test set",
    "selected_after": "the round's clients on their own test data, after training",
    "selected_before": "the round's clients on their own test data, before training",
}
"""What can be measured, the first that all runs have being the one that a comparison goes by."""

Point = tuple[int, float]


@dataclass
class RunData:
    """One run: series are lists of (round, value)."""

    directory: Path
    name: str
    tables: Mapping[str, Any]
    recipe: str
    """The resolved recipe as it is written."""
    task: Mapping[str, Any]
    protocol: Mapping[str, Any] = field(default_factory=dict)
    dense_bytes: float = 0.0
    """What a client of plain FedAvg moves in a round; 0 if the run does not say."""
    last_round: int = 0
    accuracy: dict[str, list[Point]] = field(default_factory=dict)
    """By measurement."""
    by_level: dict[str, list[Point]] = field(default_factory=dict)
    """The server's model by capacity."""
    clients: dict[str, tuple[int, dict[int, float]]] = field(default_factory=dict)
    """By measurement: the round of the highest mean, and accuracies by client."""
    losses: list[Point] = field(default_factory=list)
    totals: dict[str, list[Point]] = field(default_factory=dict)
    """Sums up to every round: bytes, macs, dense (bytes of plain FedAvg), seconds, `2 Mbps` and other links, joules."""
    failures: list[tuple[int, int, str]] = field(default_factory=list)
    """Round, client, reason."""
    observed: dict[str, dict[str, list[Point]]] = field(default_factory=dict)
    """Numbers that the method notes: by name, and by layer (or "" where there is one number)."""
    gram: dict[str, list[list[float]]] = field(default_factory=dict)
    mean_abs_u: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """By layer and width, of the last round that has them."""
    picks: dict[str, list[int]] = field(default_factory=dict)
    """By layer: how often each kernel was sent to a client."""
    picked_from: int = 0
    """Clients of all rounds that had kernels."""
    pictured: int = 0
    """The round of `gram` and `mean_abs_u`."""

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.tables.get("method", {}).get("name", "?"))

    @property
    def seed(self) -> tuple[Any, Any]:
        """What makes two runs of one recipe differ: the seeds of training and of the split."""
        return self.tables.get("train", {}).get("seed", 0), self.tables.get("partition", {}).get("seed", 0)

    @property
    def rounds(self) -> int:
        """How many rounds the recipe asks for."""
        return int(self.tables.get("train", {}).get("rounds", self.last_round))

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take in a line of metrics.jsonl."""
        if event["event"] == "start":
            self.protocol, self.dense_bytes = event["protocol"], event.get("dense_bytes", 0)
        elif event["event"] == "round":
            self._round(event)
        for one in event.get("failures", ()):
            self.failures.append((event["round"], one["client"], one["reason"]))

    def _round(self, event: Mapping[str, Any]) -> None:
        now = self.last_round = event["round"]
        self.losses.append((now, event["loss"]))
        cost = {"seconds": event["seconds"], "dense": self.dense_bytes * len(event["cohort"])}
        cost |= {f"{mbps} Mbps": seconds for mbps, seconds in event.get("link_seconds", {}).items()}
        cost |= {"joules": event["joules"]} if "joules" in event else {}
        for key, value in cost.items():
            series = self.totals.setdefault(key, [])
            series.append((now, value + (series[-1][1] if series else 0.0)))
        totals = event["totals"]
        self.totals.setdefault("bytes", []).append((now, totals["bytes_up"] + totals["bytes_down"]))
        self.totals.setdefault("macs", []).append((now, totals["macs"]))
        for level, scores in event.get("global", {}).items():
            self.by_level.setdefault(level, []).append((now, scores["accuracy"]))
        for key in MEASURED:
            if key in event:
                self._measured(key, now, event[key])
        self._observed(now, event.get("observed", {}), len(event["cohort"]) - len(event["failures"]))

    def _measured(self, key: str, now: int, scores: Mapping[str, Any]) -> None:
        largest = scores if "accuracy" in scores else scores[max(scores, key=float)]
        series = self.accuracy.setdefault(key, [])
        if "who" in scores and largest["accuracy"] > max((value for _, value in series), default=-1.0):
            self.clients[key] = now, dict(zip(scores["who"], scores["each"], strict=True))
        series.append((now, largest["accuracy"]))

    def _observed(self, now: int, figures: Mapping[str, Any], clients: int) -> None:
        for name, found in figures.items():
            if name == "picks":
                for layer, counts in found.items():
                    before = self.picks.get(layer, [0] * len(counts))
                    self.picks[layer] = [a + b for a, b in zip(before, counts, strict=True)]
                self.picked_from += clients
            elif name in ("gram", "mean_abs_u"):
                setattr(self, name, found)
                self.pictured = now
            else:
                for series, value in (found if isinstance(found, Mapping) else {"": found}).items():
                    if isinstance(value, (int, float)) and math.isfinite(value):
                        self.observed.setdefault(name, {}).setdefault(series, []).append((now, value))

    def common_failures(self) -> list[tuple[str, int]]:
        """Return the reasons of failures and how often each occurred, the most frequent first."""
        return Counter(reason for _, _, reason in self.failures).most_common()


def find(paths: Iterable[Path | str]) -> list[Path]:
    """Return the run directories at and below these paths, each once, in order."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        below = list(_below(path))
        if not below:
            raise RunError(f"{path} is no run directory and holds none: there is no recipe.toml in it or below it")
        found |= {one.resolve(): one for one in below if one.resolve() not in found}
    return list(found.values())


def _below(path: Path) -> Iterator[Path]:
    if (path / "recipe.toml").exists():
        yield path
    elif path.is_dir():
        for one in sorted(path.iterdir()):
            yield from _below(one)


def read(directories: Iterable[Path]) -> list[RunData]:
    """Read runs; each is named by the part of its path that tells it from the others."""
    directories = list(directories)
    parts = [one.resolve().parts for one in directories]
    shared = 0
    while shared < min(map(len, parts)) - 1 and len({one[shared] for one in parts}) == 1:
        shared += 1
    names = ["/".join(one[shared:]) for one in parts]
    return [read_one(one, name) for one, name in zip(directories, names, strict=True)]


def read_one(directory: Path, name: str) -> RunData:
    """Read one run, finished or not."""
    path, task = directory / "metrics.jsonl", directory / "task.json"
    tables = read_recipe(directory / "recipe.toml")
    facts = json.loads(task.read_text(encoding="utf-8")) if task.exists() else {}
    found = RunData(directory, name, tables, (directory / "recipe.toml").read_text(encoding="utf-8"), facts)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break  # a killed process was about to write it
            raise RunError(f"{path}, line {number}, is not JSON") from None
        try:
            found.hear(event)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"{path}, line {number}, is not an event of a run ({error!r})") from None
    return found
