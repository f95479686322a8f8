"""Tables of a comparison, over seeds: for a terminal, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from fedfactor.report.groups import Mean, mean
from fedfactor.runs.compare import CellOutcome
from fedfactor.runs.text import SPARE, plain

MEASURED = {"all": "all clients' own", "global": "central", "selected_after": "cohort's own, just trained"}
"""Measurements that methods can be compared by, the first that all of them have."""


# Summing up.


@dataclass(frozen=True)
class Line:
    """A method over its seeds: means, and half the width of their 95 % intervals."""

    method: str
    seeds: int
    measured: str
    """On whose test data."""
    accuracy: Mean | None
    best: Mean | None
    bytes: float
    """Up and down, a run."""
    ratio: float | None
    """Bytes of FedAvg, or of the largest, over these."""
    macs: float
    client_failures: float
    failed: tuple[str, ...]
    """Seeds that did not finish, and why."""

    def as_dict(self) -> dict[str, Any]:
        """The line as plain data, a number a key."""
        found: dict[str, Any] = {"method": self.method, "seeds": self.seeds, "measured": self.measured}
        for key, pair in (("accuracy", self.accuracy), ("best_accuracy", self.best)):
            found |= {f"{key}_mean": pair.value if pair else None, f"{key}_halfwidth": pair.half if pair else None}
        rest = {"bytes": self.bytes, "bytes_ratio": self.ratio, "macs": self.macs}
        return {**found, **rest, "client_failures": self.client_failures, "failed": "; ".join(self.failed)}


def lines(outcomes: Sequence[CellOutcome]) -> list[Line]:
    """Sum outcomes up by method, in their order, by a measurement that all of them have."""
    there = [outcome.summary for outcome in outcomes if outcome.summary is not None]
    common = next((key for key in MEASURED if there and all(key in one["measured"] for one in there)), None)
    found = []
    sizes: dict[str, float] = {}
    for method in dict.fromkeys(outcome.cell.method for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.cell.method == method]
        good = [outcome.summary for outcome in mine if outcome.summary is not None]
        key = common or next((key for key in MEASURED if good and key in good[0]["measured"]), "")
        scores = [one["measured"][key] for one in good if key in one["measured"]]
        sizes[method] = _average([one["bytes_up"] + one["bytes_down"] for one in good])
        line = Line(
            method,
            len(good),
            MEASURED.get(key, "not measured"),
            mean([score["final"] for score in scores]) if scores else None,
            mean([score["best"] for score in scores]) if scores else None,
            sizes[method],
            None,
            _average([one["macs"] for one in good]),
            _average([one["failures"] for one in good]),
            tuple(f"seed {one.cell.seed}: {one.failure}" for one in mine if one.summary is None),
        )
        found.append(line)
    reference = sizes.get("fedavg") or max(sizes.values(), default=0.0)
    return [
        Line(**{**vars(line), "ratio": reference / line.bytes if line.bytes and reference else None}) for line in found
    ]


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _columns(found: Sequence[Line], plus_minus: str) -> dict[str, list[str]]:
    """Return the cells by their heads; on whose test data stands there only if that differs."""

    def score(one: Mean | None) -> str:
        if one is None:
            return "-"
        return f"{100 * one.value:.2f}" + ("" if one.half is None else f" {plus_minus} {100 * one.half:.2f}")

    columns = {
        "method": [line.method for line in found],
        "seeds": [str(line.seeds) for line in found],
        "accuracy %": [score(line.accuracy) for line in found],
        "best %": [score(line.best) for line in found],
        "test data": [line.measured for line in found],
        "MB": [plain(line.bytes / 1e6) for line in found],
        "fewer bytes": ["-" if line.ratio is None else f"{line.ratio:.2f}x" for line in found],
        "GMAC": [plain(line.macs / 1e9) for line in found],
    }
    if len(set(columns["test data"])) == 1:
        del columns["test data"]
    return columns


def _caption(found: Sequence[Line]) -> str:
    measured = list(dict.fromkeys(line.measured for line in found))
    tested = f"Test data: {measured[0]}. " if len(measured) == 1 else ""
    over = "FedAvg's" if any(line.method == "fedavg" for line in found) else "the largest run's"
    return f"{tested}Mean ± half the 95 % interval (Student's t) over seeds; bytes against {over}."


def table(found: Sequence[Line]) -> Table:
    """Lay the comparison out for a terminal."""
    view = Table(caption=_caption(found), **{**SPARE, "padding": (0, 0, 0, 1)})
    columns = _columns(found, "±")
    for head in columns:
        view.add_column(head, justify="left" if head in ("method", "test data") else "right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        view.add_row(*row)
    return view


def latex(found: Sequence[Line]) -> str:
    """Write the comparison as a LaTeX table; what its figures are stands in a comment above it."""
    columns = _columns(found, "PM")
    sides = "".join("l" if head in ("method", "test data") else "r" for head in columns)
    head = _latex_row([_escaped(head) for head in columns])
    body = [_latex_row([_escaped(cell) for cell in row]) for row in zip(*columns.values(), strict=True)]
    parts = [f"% {_caption(found)}", rf"\begin{{tabular}}{{{sides}}}", r"\hline", head, r"\hline", *body]
    return "\n".join([*parts, r"\hline", r"\end{tabular}"]).replace(" PM ", r" $\pm$ ") + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _escaped(text: str) -> str:
    return "".join(f"\\{sign}" if sign in "&%$#_{}" else sign for sign in text)


def csv_text(found: Sequence[Line]) -> str:
    """Write the comparison as CSV, a number a column."""
    rows = [line.as_dict() for line in found]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
