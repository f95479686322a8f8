"""Groups of runs that differ in their seeds only, and means over them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fedfactor.report.read import Point, RunData
from fedfactor.report.values import slug
from fedfactor.runs.open import flat, varied
from fedfactor.task import Decider

SEEDS = ("train.seed", "partition.seed")
IGNORED = ("name", "train.device", "run.keep_rounds", "evaluate.joules_per_byte", "evaluate.target")
"""Settings that do not change what is learned."""
FEW_SETTINGS = 2
"""If at most this many settings other than the method's differ between groups, every label shows them."""


@dataclass(frozen=True)
class Mean:
    """A mean over seeds and half the width of its 95 % interval, which is None for a single run."""

    value: float
    half: float | None
    count: int

    def text(self, form: Callable[[float], str]) -> str:
        """Format the mean and, if there is one, its interval. A unit that both share is written once."""
        value = form(self.value)
        if not self.half:
            return value
        half = form(self.half)
        number, _, unit = value.rpartition(" ")
        return f"{number} ± {half}" if number and half.endswith(f" {unit}") else f"{value} ± {half}"


def written(mean: Mean | None, form: Callable[[float], str], missing: str = "-") -> str:
    """Format a mean that may be missing."""
    return missing if mean is None else mean.text(form)


@dataclass
class Group:
    """Runs of one recipe with different seeds."""

    number: int
    label: str
    runs: list[RunData] = field(default_factory=list)

    @property
    def method(self) -> str:
        """The method's name."""
        return self.runs[0].method

    @property
    def decider(self) -> Decider:
        """The metric by which models are compared."""
        return self.runs[0].decider

    @property
    def slug(self) -> str:
        """The number and the label, for names of figures and files."""
        return f"{self.number}-{slug(self.label)}"

    def curve(self, series: Callable[[RunData], Sequence[Point]]) -> list[tuple[float, Mean]]:
        """Average a series over the runs. Each round is averaged over the runs that have a value for it."""
        found: dict[int, list[float]] = {}
        for run in self.runs:
            for round, value in series(run):
                found.setdefault(round, []).append(value)
        return [(round, mean(values)) for round, values in sorted(found.items())]

    def over(self, figure: Callable[[RunData], float | None]) -> Mean | None:
        """Average a number over the runs that have it. Return None if none has."""
        values = [value for value in map(figure, self.runs) if value is not None]
        return mean(values) if values else None


def mean(values: Sequence[float]) -> Mean:
    """Return the mean with its 95 % interval by Student's t-distribution."""
    count = len(values)
    middle = math.fsum(values) / count
    if count < 2:
        return Mean(middle, None, count)
    variance = math.fsum((value - middle) ** 2 for value in values) / (count - 1)
    return Mean(middle, t_quantile(count - 1) * math.sqrt(variance / count), count)


@cache
def t_quantile(freedom: int, level: float = 0.95) -> float:
    """Return t such that Student's distribution lies within [-t, t] with probability `level`.

    SciPy has this too, but it is no dependency of the core, and nothing else here needs it.
    """
    low, high = 0.0, 1.0
    while _within(high, freedom) < level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """Return the probability of [-t, t]: Abramowitz and Stegun 26.7.3 (odd) and 26.7.4 (even)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    total, term = 0.0, cosine if odd else 1.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def group_runs(runs: Iterable[RunData]) -> tuple[list[Group], list[str]]:
    """Return the groups in the order of their first runs, and a remark on each run that was left out."""
    found: dict[str, Group] = {}
    remarks, first = [], None
    for run in runs:
        first = first or run
        if run.decider != first.decider:
            remarks.append(
                f"{run.name} is left out: it is measured by {run.decider}, and {first.name} by {first.decider}. A "
                "report compares runs by one metric; report the others separately."
            )
            continue
        group = found.setdefault(json.dumps(_settings(run), sort_keys=True, default=str), Group(len(found), ""))
        twin = next((other for other in group.runs if other.seed == run.seed), None)
        if twin is None:
            group.runs.append(run)
            continue
        # Counting the same run twice would make the interval look smaller than it is.
        longer, shorter = (run, twin) if run.last_round > twin.last_round else (twin, run)
        group.runs[group.runs.index(twin)] = longer
        remarks.append(f"{shorter.name} is left out: it has the same recipe and seed as {longer.name}.")
    groups = list(found.values())
    _label(groups)
    return groups, remarks


def _settings(run: RunData) -> dict[str, Any]:
    tables = {key: value for key, value in run.tables.items() if key != "paper"}
    return {key: value for key, value in flat(tables).items() if key not in (*SEEDS, *IGNORED)}


def _label(groups: list[Group]) -> None:
    """Label each group with its method and the fewest settings that distinguish it from the other groups."""
    settings = [_settings(group.runs[0]) for group in groups]
    shared = [key for key in varied(settings) if not key.startswith("method.")]
    for group, own in zip(groups, settings, strict=True):
        same_method = [other for other in settings if other.get("method.name") == own.get("method.name")]
        keys = [*_distinguishing(same_method), *(shared if len(shared) <= FEW_SETTINGS else [])]
        words = [f"{_short(key)}={_plain(own[key])}" for key in dict.fromkeys(keys) if key in own]
        group.label = " ".join([group.method, *words])


def _distinguishing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Choose few keys that tell all settings apart: repeatedly the key that splits them into most parts."""
    keys, found = varied(settings), list[str]()

    def parts(chosen: Sequence[str]) -> int:
        return len({json.dumps([one.get(key) for key in chosen], default=str) for one in settings})

    while parts(found) < len(settings):
        best = max(keys, key=lambda key: parts([*found, key]))
        if parts([*found, best]) == parts(found):
            break  # the rest differs in ignored settings only
        found.append(best)
    return found


def _short(key: str) -> str:
    section, _, name = key.rpartition(".")
    return section if name in ("name", "kind") else name


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
