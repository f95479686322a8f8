"""Runs that differ by their seed only are one group: its mean, and how sure that mean is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fedfactor.report.read import Point, RunData
from fedfactor.runs.open import flat

SEEDS = ("train.seed", "partition.seed")
NO_MATTER = ("name", "train.device", "run.keep_rounds", "evaluate.joules_per_byte", "evaluate.target")
"""Keys whose value does not change what is learnt."""


@dataclass(frozen=True)
class Mean:
    """A mean over seeds and the half width of its 95 % interval, which a single run does not have."""

    value: float
    half: float | None
    count: int

    def text(self, form: Callable[[float], str]) -> str:
        """Write it as a number, with its interval where there is one; a unit that both share is written once."""
        value = form(self.value)
        if not self.half:
            return value
        half = form(self.half)
        number, _, unit = value.rpartition(" ")
        return f"{number} ± {half}" if number and half.endswith(f" {unit}") else f"{value} ± {half}"


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

    def curve(self, series: Callable[[RunData], Sequence[Point]]) -> list[tuple[int, Mean]]:
        """Average a series over the runs, round by round, over those that have the round."""
        found: dict[int, list[float]] = {}
        for run in self.runs:
            for round, value in series(run):
                found.setdefault(round, []).append(value)
        return [(round, mean(values)) for round, values in sorted(found.items())]

    def over(self, figure: Callable[[RunData], float | None]) -> Mean | None:
        """Average a figure over the runs that have it; `None` if none has."""
        values = [value for value in map(figure, self.runs) if value is not None]
        return mean(values) if values else None


def mean(values: Sequence[float]) -> Mean:
    """Average values, with the interval of Student's t."""
    count = len(values)
    middle = math.fsum(values) / count
    if count < 2:
        return Mean(middle, None, count)
    spread = math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (count - 1))
    return Mean(middle, t_quantile(count - 1) * spread / math.sqrt(count), count)


@cache
def t_quantile(freedom: int, level: float = 0.95) -> float:
    """Return the t that Student's distribution stays within with this probability, either side of 0."""
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


def group(runs: Iterable[RunData]) -> tuple[list[Group], list[str]]:
    """Put runs into groups, in the order they are met; also say which runs were left out, and why."""
    found: dict[str, Group] = {}
    remarks = []
    for run in runs:
        one = found.setdefault(_key(run), Group(len(found), ""))
        twin = next((other for other in one.runs if other.seed == run.seed), None)
        if twin is None:
            one.runs.append(run)
            continue
        # The same bits once more would only make the interval look smaller.
        longer, shorter = (run, twin) if run.last_round > twin.last_round else (twin, run)
        one.runs[one.runs.index(twin)] = longer
        remarks.append(f"{shorter.name} has the recipe and the seed of {longer.name} and is left out")
    groups = list(found.values())
    _label(groups)
    return groups, remarks


def _settings(run: RunData) -> dict[str, Any]:
    tables = {key: value for key, value in run.tables.items() if key != "paper"}
    return {key: value for key, value in flat(tables).items() if key not in (*SEEDS, *NO_MATTER)}


def _key(run: RunData) -> str:
    return json.dumps(_settings(run), sort_keys=True, default=str)


def _label(groups: list[Group]) -> None:
    """Name each group by its method and by the fewest settings that tell it from the others."""
    settings = [_settings(one.runs[0]) for one in groups]
    shared = [key for key in _varied(settings) if not key.startswith("method.")]
    for one, mine in zip(groups, settings, strict=True):
        kin = [other for other in settings if other.get("method.name") == mine.get("method.name")]
        # Where little else differs, it is said of every group.
        keys = [*_telling(kin), *(shared if len(shared) <= FEW else [])]
        words = [f"{_short(key)}={_plain(mine[key])}" for key in dict.fromkeys(keys) if key in mine]
        one.label = " ".join([one.method, *words])


FEW = 2


def _telling(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return few keys that tell all settings apart: again and again the one that splits them into most parts."""
    keys, found = _varied(settings), list[str]()

    def parts(chosen: Sequence[str]) -> int:
        return len({json.dumps([one.get(key) for key in chosen], default=str) for one in settings})

    while parts(found) < len(settings):
        best = max(keys, key=lambda key: parts([*found, key]))
        if parts([*found, best]) == parts(found):
            break  # only what is not shown differs
        found.append(best)
    return found


def _varied(settings: Sequence[dict[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({json.dumps(one.get(key), default=str) for one in settings}) > 1]


def _short(key: str) -> str:
    section, _, name = key.rpartition(".")
    return section if name in ("name", "kind") else name


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
