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

from fedfactor.report.groups import Mean, mean
from fedfactor.runs.compare import CellOutcome, ranking
from fedfactor.runs.text import SPARE, plain
from fedfactor.runs.tuning import Tuning

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
    accuracy: Mean | None
    best: Mean | None
    at: Mapping[float, Mean]
    """Last accuracy of the server's model at each capacity, or of the clients of each capacity on their own data."""
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

    def as_dict(self) -> dict[str, Any]:
        """Return the line as plain data, one number per key."""
        found: dict[str, Any] = {"run": self.label, "method": self.method, "seeds": self.seeds, "splits": self.splits}
        found |= {"measured": self.measured, "trained_capacities": _levels(self.trained)}
        found |= _pair("accuracy", self.accuracy) | _pair("best_accuracy", self.best)
        found |= {"bytes": self.bytes, "bytes_ratio": self.ratio, "macs": self.macs}
        found |= {"client_failures": self.client_failures, "failed": "; ".join(self.failed)}
        if self.tuning:
            tried = self.tuning.candidates
            scores = [f"{one}: {candidate_score(one.accuracy, one.diverged)}" for one in tried]
            found |= {"tuned": _chosen(self.tuning), "tuning_candidates_percent": "; ".join(scores)}
            found |= {"tuning_rounds": self.tuning.rounds, "tuning_seed": self.tuning.seed}
        for level, accuracy in self.at.items():
            found |= _pair(f"accuracy_at_{level:g}", accuracy)
        return found


def _pair(key: str, one: Mean | None) -> dict[str, float | None]:
    return {f"{key}_mean": one.value if one else None, f"{key}_halfwidth": one.half if one else None}


def lines(outcomes: Sequence[CellOutcome]) -> list[Line]:
    """Summarise outcomes by label, in their order, by a measurement that all of them have."""
    there = [outcome.summary for outcome in outcomes if outcome.summary is not None]
    common = ranking(there)
    by_label: dict[str, list[CellOutcome]] = {}
    for outcome in outcomes:
        by_label.setdefault(outcome.cell.label, []).append(outcome)
    found = [_line(label, same, common) for label, same in by_label.items()]
    dense = _dense(found)
    reference = dense.bytes if dense else max((line.bytes for line in found), default=0.0)
    return [replace(line, ratio=reference / line.bytes if line.bytes else None) for line in found]


def _line(label: str, outcomes: Sequence[CellOutcome], common: str | None) -> Line:
    good = [one.summary for one in outcomes if one.summary is not None]
    key = common or next((key for key in MEASURED if good and key in good[0]["measured"]), "")
    scores = [one["measured"][key] for one in good if key in one["measured"]]
    final, best = (mean([one[which] for one in scores]) if scores else None for which in ("final", "best"))
    by_level: dict[float, list[float]] = {}
    for level, accuracy in (pair for one in scores for pair in one.get("at", {}).items()):
        by_level.setdefault(float(level), []).append(accuracy)
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
    )


def _dense(found: Sequence[Line]) -> Line | None:
    """Return the line of FedAvg, if there is exactly one that has moved bytes."""
    dense = [line for line in found if line.method == "fedavg" and line.bytes]
    return dense[0] if len(dense) == 1 else None


# Tables: each has columns of text and a caption.


def _score(one: Mean | None) -> str:
    if one is None:
        return "-"
    return f"{100 * one.value:.2f}" + ("" if one.half is None else f" ± {100 * one.half:.2f}")


def _levels(levels: Iterable[float]) -> str:
    return ", ".join(f"{level:g}" for level in levels) or "-"


def _chosen(tuning: Tuning | None) -> str:
    return "-" if tuning is None or tuning.failure else str(tuning.chosen)


def _tables(found: Sequence[Line]) -> list[tuple[Columns, str]]:
    """Return the comparison, the accuracy at each capacity if there are several, and what tuning has tried."""
    tuning = [_tuning(found)] if any(line.tuning for line in found) else []
    return [*_results(found), *tuning]


def _tuning(found: Sequence[Line]) -> tuple[Columns, str]:
    tried = [(line, line.tuning, one) for line in found if line.tuning for one in line.tuning.candidates]
    columns = {
        "run": [line.label for line, *_ in tried],
        "candidate": [str(one) for *_, one in tried],
        "validation %": [candidate_score(one.accuracy, one.diverged) for *_, one in tried],
        "chosen": ["yes" if str(one) == _chosen(tuning) else "" for _, tuning, one in tried],
    }
    _, tuning, _ = tried[0]
    return columns, tuning_words(tuning.as_dict())


def candidate_score(accuracy: float | None, diverged: bool) -> str:
    """Return the accuracy of a candidate in percent, or why there is none."""
    return "diverged" if diverged else "failed" if accuracy is None else f"{100 * accuracy:.2f}"


def tuning_words(tuning: Mapping[str, Any]) -> str:
    """Return how settings were chosen, given a `Tuning` as plain data."""
    return (
        f"Tuning: accuracy on validation data ({MEASURED.get(tuning['measured'], 'not measured')}) after "
        f"{tuning['rounds']} rounds with seed {tuning['seed']}; a share of {tuning['validation_share']:g} of each "
        "client's training examples was held out. Test data were not used."
    )


def _results(found: Sequence[Line]) -> list[tuple[Columns, str]]:
    columns = {
        "run": [line.label for line in found],
        "tuned": [_chosen(line.tuning) for line in found],
        "seeds": [str(line.seeds) for line in found],
        "trained": [_levels(line.trained) for line in found],
        "accuracy %": [_score(line.accuracy) for line in found],
        "best %": [_score(line.best) for line in found],
        "test data": [line.measured for line in found],
        "MB": [plain(line.bytes / 1e6) for line in found],
        "fewer bytes": ["-" if line.ratio is None else f"{line.ratio:.2f}x" for line in found],
        "GMAC": ["-" if line.macs is None else plain(line.macs / 1e9) for line in found],
    }
    same = [head for head in SAME_FOR_ALL if len(set(columns[head])) == 1]
    words = [f"{SAME_FOR_ALL[head]}: {columns.pop(head)[0]}." for head in same]
    if not any(line.tuning for line in found):
        del columns["tuned"]
    if any(line.validation for line in found):
        words.append("Measured on validation data, which are held out of the clients' training data.")
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
        words.append("Accuracy on central test data is that of the server's largest model.")
        by_capacity.append("Central test data: the server's model of that capacity; -: there is none.")
    if tested != {MEASURED["global"]}:
        by_capacity.append("Clients' own test data: the clients of that capacity, whatever capacity they trained.")
    at = {f"capacity {level:g}": [_score(line.at.get(level)) for line in found] for level in levels}
    by_level = {"run": columns["run"], **at}
    return [(columns, " ".join(words)), (by_level, " ".join(["Accuracy in % by capacity.", *by_capacity]))]


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
