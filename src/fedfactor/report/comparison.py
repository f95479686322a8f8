"""Tables that compare methods, or the cells of a sweep, over seeds: for a terminal, as LaTeX and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rich.console import Group as Stacked
from rich.table import Table

from fedfactor.report.groups import Mean, mean, written
from fedfactor.report.values import joules, span
from fedfactor.runs.compare import CellOutcome, ranking
from fedfactor.runs.text import SPARE, plain
from fedfactor.runs.tuning import Tuning
from fedfactor.task import Decider

MEASURED = {"all": "all clients' own", "global": "central", "selected_after": "cohort's own, just trained"}
"""Measurements by which methods can be compared."""
LEFT_ALIGNED = ("run", "tuned", "candidate", "test data", "trained")
SAME_FOR_ALL = {"test data": "Test data", "trained": "Trained capacity"}
"""Columns that move to the caption, with these words, if they are the same for all methods."""
LATEX = str.maketrans({"±": r"$\pm$", "\\": r"\textbackslash{}", **{sign: f"\\{sign}" for sign in "&%$#_{}"}})

Columns = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Line:
    """One method, variant or cell of a sweep over its seeds."""

    label: str
    method: str
    seeds: int
    splits: int
    """Number of different partitions of the data among the runs."""
    measured: str
    """The test data."""
    trained: tuple[float, ...]
    """The capacities that clients really trained: 1 alone if the method ignores capacities."""
    decider: Decider
    """The metric of these scores."""
    score: Mean | None
    best: Mean | None
    at: Mapping[float, Mean]
    """Last score of the server's model at each capacity, or of the clients of each capacity on their own data."""
    bytes: float
    """Uploaded and downloaded, per run."""
    ratio: float | None
    """Bytes of FedAvg, or of the run that moves most, divided by these."""
    macs: float | None
    """`None` if the operations cannot be counted."""
    client_failures: float
    failed: tuple[str, ...]
    """Seeds that did not finish, each with the reason."""
    validation: bool
    """Whether held-out training examples were measured on instead of test data."""
    tuning: Tuning | None
    seconds: Mean | None = None
    """Simulated seconds of the run on its fleet; `None` if it has none. So also `joules`."""
    joules: Mean | None = None
    target: float | None = None
    """Value of the metric; `to_target` is the time until it is reached."""
    to_target: Mean | None = None
    """Simulated seconds until the target is reached, over the seeds that reach it."""

    def as_dict(self) -> dict[str, Any]:
        """Return the line as plain data, one number per key."""
        found: dict[str, Any] = {"run": self.label, "method": self.method, "seeds": self.seeds, "splits": self.splits}
        found |= {"measured": self.measured, "trained_capacities": _levels(self.trained)}
        name = self.decider.name
        found |= _pair(name, self.score) | _pair(f"best_{name}", self.best)
        found |= {"bytes": self.bytes, "bytes_ratio": self.ratio, "macs": self.macs}
        found |= {"client_failures": self.client_failures, "failed": "; ".join(self.failed)}
        if self.tuning:
            tried = self.tuning.candidates
            scores = [f"{one}: {candidate_score(one.score, one.diverged, self.decider)}" for one in tried]
            unit = "_percent" if self.decider.is_share else ""
            found |= {"tuned": _chosen(self.tuning), f"tuning_candidates{unit}": "; ".join(scores)}
            found |= {"tuning_rounds": self.tuning.rounds, "tuning_seed": self.tuning.seed}
        if self.seconds:
            found |= _pair("simulated_seconds", self.seconds) | _pair("simulated_joules", self.joules)
            found |= {"target": self.target, **_pair("simulated_seconds_to_target", self.to_target)}
            found["seeds_that_reach_the_target"] = self.to_target.count if self.to_target else 0
        for level, score in self.at.items():
            found |= _pair(f"{name}_at_{level:g}", score)
        return found


def _pair(key: str, one: Mean | None) -> dict[str, float | None]:
    return {f"{key}_mean": one.value if one else None, f"{key}_halfwidth": one.half if one else None}


def lines(outcomes: Sequence[CellOutcome]) -> list[Line]:
    """Summarise outcomes by label, in their order, by a measurement that all of them have."""
    there = [outcome.summary for outcome in outcomes if outcome.summary is not None]
    common, first = ranking(there), Decider.read(there[0] if there else {})
    by_label: dict[str, list[CellOutcome]] = {}
    for outcome in outcomes:
        by_label.setdefault(outcome.cell.label, []).append(outcome)
    found = [_line(label, same, common, first) for label, same in by_label.items()]
    dense = _dense(found)
    reference = dense.bytes if dense else max((line.bytes for line in found), default=0.0)
    return [replace(line, ratio=reference / line.bytes if line.bytes else None) for line in found]


def _line(label: str, outcomes: Sequence[CellOutcome], common: str | None, first: Decider) -> Line:
    good = [one.summary for one in outcomes if one.summary is not None]
    key = common or next((key for key in MEASURED if good and key in good[0]["measured"]), "")
    scores = [one["measured"][key] for one in good if key in one["measured"]]
    final, best = (mean([one[which] for one in scores]) if scores else None for which in ("final", "best"))
    by_level: dict[float, list[float]] = {}
    for level, score in (pair for one in scores for pair in one.get("at", {}).items()):
        by_level.setdefault(float(level), []).append(score)
    counted = [one["macs"] for one in good]
    size, macs, failures = (
        fmean(values) if values else 0.0
        for values in (
            [one["bytes_up"] + one["bytes_down"] for one in good],
            [] if None in counted else counted,
            [one["failures"] for one in good],
        )
    )
    return Line(
        label,
        outcomes[0].cell.method,
        len(good),
        len({one.cell.recipe.tables["partition"]["seed"] for one in outcomes if one.summary is not None}),
        MEASURED.get(key, "not measured"),
        tuple(sorted({level for one in good for level in one.get("trained_capacities", ())}, reverse=True)),
        Decider.read(good[0]) if good else first,
        final,
        best,
        {level: mean(values) for level, values in sorted(by_level.items(), reverse=True)},
        size,
        None,
        None if None in counted else macs,
        failures,
        tuple(f"seed {one.cell.seed}: {one.failure}" for one in outcomes if one.summary is None),
        any(one.cell.recipe.tables["partition"]["evaluate_on"] == "validation" for one in outcomes),
        outcomes[0].tuning,
        _mean_of(one.get("simulated_seconds") for one in good),
        _mean_of(one.get("simulated_joules") for one in good),
        next((one["target"] for one in scores if "target" in one), None),
        _mean_of((one.get("reached") or {}).get("simulated_seconds") for one in scores),
    )


def _mean_of(values: Iterable[float | None]) -> Mean | None:
    """Average the values that are there. Return None if there is none."""
    there = [value for value in values if value is not None]
    return mean(there) if there else None


def _dense(found: Sequence[Line]) -> Line | None:
    """Return the line of FedAvg, if there is exactly one that has moved bytes."""
    dense = [line for line in found if line.method == "fedavg" and line.bytes]
    return dense[0] if len(dense) == 1 else None


# Tables: each has columns of text and a caption.


def _score(one: Mean | None, decider: Decider) -> str:
    if one is None:
        return "-"
    return _number(one.value, decider) + ("" if one.half is None else f" ± {_number(one.half, decider)}")


def _number(value: float, decider: Decider) -> str:
    """Format a score without its unit, which is in the head of the column."""
    return f"{100 * value:.2f}" if decider.is_share else f"{value:.4g}"


def score_head(name: str, decider: Decider) -> str:
    """Return the head of a column of scores."""
    return f"{name} %" if decider.is_share else name


def _levels(levels: Iterable[float]) -> str:
    return ", ".join(f"{level:g}" for level in levels) or "-"


def _chosen(tuning: Tuning | None) -> str:
    return "-" if tuning is None or tuning.failure else str(tuning.chosen)


def _tables(found: Sequence[Line]) -> list[tuple[Columns, str]]:
    """Return the comparison, the score at each capacity if there are several, and what tuning has tried."""
    tuning = [_tuning(found)] if any(line.tuning for line in found) else []
    return [*_results(found), *tuning]


def _tuning(found: Sequence[Line]) -> tuple[Columns, str]:
    tried = [(line, line.tuning, one) for line in found if line.tuning for one in line.tuning.candidates]
    _, tuning, _ = tried[0]
    columns = {
        "run": [line.label for line, *_ in tried],
        "candidate": [str(one) for *_, one in tried],
        score_head("validation", tuning.metric): [
            candidate_score(one.score, one.diverged, tuning.metric) for *_, one in tried
        ],
        "chosen": ["yes" if str(one) == _chosen(how) else "" for _, how, one in tried],
    }
    return columns, tuning_words(tuning.as_dict())


def candidate_score(score: float | None, diverged: bool, decider: Decider) -> str:
    """Return the score of a candidate (a share in percent), or why there is none."""
    return "diverged" if diverged else "failed" if score is None else _number(score, decider)


def tuning_words(tuning: Mapping[str, Any]) -> str:
    """Return how settings were chosen, given a `Tuning` as plain data."""
    return (
        f"Tuning: {Decider.read(tuning).name} on validation data "
        f"({MEASURED.get(tuning['measured'], 'not measured')}) after {tuning['rounds']} rounds with seed "
        f"{tuning['seed']}; a share of {tuning['validation_share']:g} of each client's training examples was held out. "
        "Test data were not used."
    )


def _results(found: Sequence[Line]) -> list[tuple[Columns, str]]:
    decider, mixed = found[0].decider, len({line.decider for line in found}) > 1
    heads = ["score", "best"] if mixed else [score_head(name, decider) for name in (decider.name, "best")]
    names = [f"{score_head(line.decider.name, line.decider)} " if mixed else "" for line in found]
    columns = {
        "run": [line.label for line in found],
        "tuned": [_chosen(line.tuning) for line in found],
        "seeds": [str(line.seeds) for line in found],
        "trained": [_levels(line.trained) for line in found],
        heads[0]: [name + _score(line.score, line.decider) for name, line in zip(names, found, strict=True)],
        heads[1]: [_score(line.best, line.decider) for line in found],
        "test data": [line.measured for line in found],
        "MB": [plain(line.bytes / 1e6) for line in found],
        "fewer bytes": ["-" if line.ratio is None else f"{line.ratio:.2f}x" for line in found],
        "GMAC": ["-" if line.macs is None else plain(line.macs / 1e9) for line in found],
        **_on_the_fleet(found),
    }
    same = [head for head in SAME_FOR_ALL if len(set(columns[head])) == 1]
    words = [f"{SAME_FOR_ALL[head]}: {columns.pop(head)[0]}." for head in same]
    if not any(line.tuning for line in found):
        del columns["tuned"]
    if any(line.validation for line in found):
        words.append("Measured on validation data, which are held out of the clients' training data.")
    if any(line.seconds for line in found):
        words.append("Time and energy: of the run on its simulated fleet.")
    if "trained" in columns:
        words.append("Trained: the capacities that clients really trained; 1 is the whole model.")
    over = "FedAvg's" if _dense(found) else "the largest run's"
    words.append(f"Mean ± half the 95 % interval (Student's t) over seeds{_splits(found)}; bytes against {over}.")
    levels = sorted({level for line in found for level in line.at}, reverse=True)
    if len(levels) < 2:
        return [(columns, " ".join(words))]
    tested = {line.measured for line in found if line.at}
    by_capacity = []
    if MEASURED["global"] in tested:
        words.append(f"{decider.title} on central test data is that of the server's largest model.")
        by_capacity.append("Central test data: the server's model of that capacity; -: there is none.")
    if tested != {MEASURED["global"]}:
        by_capacity.append("Clients' own test data: the clients of that capacity, whatever capacity they trained.")
    at = {f"capacity {level:g}": [_score(line.at.get(level), line.decider) for line in found] for level in levels}
    by_level = {"run": columns["run"], **at}
    by_capacity.insert(0, f"{decider.title}{' in %' if decider.is_share else ''} by capacity.")
    return [(columns, " ".join(words)), (by_level, " ".join(by_capacity))]


def _on_the_fleet(found: Sequence[Line]) -> Columns:
    """Return the columns of runs with a virtual clock: time, time to the target, and energy."""
    if not any(line.seconds for line in found):
        return {}
    columns = {"time": [written(line.seconds, span) for line in found]}
    heads = [_target(line) for line in found]
    for head in dict.fromkeys(filter(None, heads)):
        columns[head] = [_reached(line) if one == head else "-" for one, line in zip(heads, found, strict=True)]
    if any(line.joules for line in found):
        columns["energy"] = [written(line.joules, joules) for line in found]
    return columns


def _target(line: Line) -> str:
    """Return the head of the column with the time to a line's target; empty if it has none."""
    if line.target is None:
        return ""
    return f"to {100 * line.target:g} %" if line.decider.is_share else f"to {line.decider.name} {line.target:.4g}"


def _reached(line: Line) -> str:
    some = f" ({line.to_target.count} of {line.seeds})" if line.to_target and line.to_target.count < line.seeds else ""
    return written(line.to_target, span, "never") + some


def _splits(found: Sequence[Line]) -> str:
    """Say whether intervals include the variance of the split, if there are intervals."""
    if max((line.seeds for line in found), default=0) < 2:
        return ""
    own = all(line.splits == line.seeds for line in found)
    return ", each with its own split of the data" if own else " on the same split of the data"


def table(found: Sequence[Line]) -> Stacked:
    """Return the comparison as tables for a terminal."""
    views: list[Table | str] = []
    for columns, caption in _tables(found):
        view = Table(caption=caption, **{**SPARE, "padding": (0, 0, 0, 1)})
        for head in columns:
            view.add_column(head, justify="left" if head in LEFT_ALIGNED else "right", overflow="fold")
        for row in zip(*columns.values(), strict=True):
            view.add_row(*row)
        views += [view, ""]
    return Stacked(*views[:-1])


def latex(found: Sequence[Line]) -> str:
    """Return the comparison as LaTeX tables. A comment above each explains the figures."""
    text = []
    for columns, caption in _tables(found):
        sides = "".join("l" if head in LEFT_ALIGNED else "r" for head in columns)
        head, *body = (
            " & ".join(cell.translate(LATEX) for cell in row) + r" \\"
            for row in (columns, *zip(*columns.values(), strict=True))
        )
        start, end = rf"\begin{{tabular}}{{{sides}}}", r"\end{tabular}"
        text += [f"% {caption}", start, r"\hline", head, r"\hline", *body, r"\hline", end, ""]
    return "\n".join(text)


def csv_text(found: Sequence[Line]) -> str:
    """Return the comparison as CSV, one number per column."""
    rows = [line.as_dict() for line in found]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
