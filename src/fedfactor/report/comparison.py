"""Tables that compare methods over seeds: for a terminal, as LaTeX and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from fedfactor.report.groups import Mean, mean
from fedfactor.runs.compare import CellOutcome
from fedfactor.runs.text import SPARE, plain

MEASURED = {"all": "all clients' own", "global": "central", "selected_after": "cohort's own, just trained"}
"""Measurements by which methods can be compared. The first one that all methods have is used."""
LEFT_ALIGNED = ("method", "test data")
LATEX = str.maketrans({"±": r"$\pm$", "\\": r"\textbackslash{}", **{sign: f"\\{sign}" for sign in "&%$#_{}"}})


@dataclass(frozen=True)
class Line:
    """One method over its seeds."""

    method: str
    seeds: int
    measured: str
    """The test data."""
    accuracy: Mean | None
    best: Mean | None
    bytes: float
    """Uploaded and downloaded, per run."""
    ratio: float | None
    """Bytes of FedAvg, or of the method that moves most, divided by these."""
    macs: float
    client_failures: float
    failed: tuple[str, ...]
    """Seeds that did not finish, each with the reason."""

    def as_dict(self) -> dict[str, Any]:
        """Return the line as plain data, one number per key."""
        found: dict[str, Any] = {"method": self.method, "seeds": self.seeds, "measured": self.measured}
        for key, pair in (("accuracy", self.accuracy), ("best_accuracy", self.best)):
            found |= {f"{key}_mean": pair.value if pair else None, f"{key}_halfwidth": pair.half if pair else None}
        rest = {"bytes": self.bytes, "bytes_ratio": self.ratio, "macs": self.macs}
        return {**found, **rest, "client_failures": self.client_failures, "failed": "; ".join(self.failed)}


def lines(outcomes: Sequence[CellOutcome]) -> list[Line]:
    """Summarise outcomes by method, in their order, by a measurement that all of them have."""
    there = [outcome.summary for outcome in outcomes if outcome.summary is not None]
    common = next((key for key in MEASURED if there and all(key in one["measured"] for one in there)), None)
    finished = {
        method: [one.summary for one in outcomes if one.cell.method == method and one.summary is not None]
        for method in dict.fromkeys(outcome.cell.method for outcome in outcomes)
    }
    sizes = {
        method: _average([one["bytes_up"] + one["bytes_down"] for one in good]) for method, good in finished.items()
    }
    reference = sizes.get("fedavg") or max(sizes.values(), default=0.0)
    found = []
    for method, good in finished.items():
        key = common or next((key for key in MEASURED if good and key in good[0]["measured"]), "")
        scores = [one["measured"][key] for one in good if key in one["measured"]]
        final, best = (mean([one[which] for one in scores]) if scores else None for which in ("final", "best"))
        ratio = reference / sizes[method] if sizes[method] and reference else None
        macs, failures = (_average([one[which] for one in good]) for which in ("macs", "failures"))
        bad = [one for one in outcomes if one.cell.method == method and one.summary is None]
        failed = tuple(f"seed {one.cell.seed}: {one.failure}" for one in bad)
        measured = MEASURED.get(key, "not measured")
        found.append(Line(method, len(good), measured, final, best, sizes[method], ratio, macs, failures, failed))
    return found


def _average(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _columns(found: Sequence[Line]) -> dict[str, list[str]]:
    """Return the cells by column. The column of test data is left out if it is the same for all methods."""

    def score(one: Mean | None) -> str:
        if one is None:
            return "-"
        return f"{100 * one.value:.2f}" + ("" if one.half is None else f" ± {100 * one.half:.2f}")

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
    measured = {line.measured for line in found}
    tested = f"Test data: {measured.pop()}. " if len(measured) == 1 else ""
    over = "FedAvg's" if any(line.method == "fedavg" for line in found) else "the largest run's"
    return f"{tested}Mean ± half the 95 % interval (Student's t) over seeds; bytes against {over}."


def table(found: Sequence[Line]) -> Table:
    """Return the comparison as a table for a terminal."""
    view = Table(caption=_caption(found), **{**SPARE, "padding": (0, 0, 0, 1)})
    columns = _columns(found)
    for head in columns:
        view.add_column(head, justify="left" if head in LEFT_ALIGNED else "right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        view.add_row(*row)
    return view


def latex(found: Sequence[Line]) -> str:
    """Return the comparison as a LaTeX table. A comment above it explains the figures."""
    columns = _columns(found)
    sides = "".join("l" if head in LEFT_ALIGNED else "r" for head in columns)
    head, *body = (
        " & ".join(cell.translate(LATEX) for cell in row) + r" \\"
        for row in (columns, *zip(*columns.values(), strict=True))
    )
    start, end = rf"\begin{{tabular}}{{{sides}}}", r"\end{tabular}"
    return "\n".join([f"% {_caption(found)}", start, r"\hline", head, r"\hline", *body, r"\hline", end, ""])


def csv_text(found: Sequence[Line]) -> str:
    """Return the comparison as CSV, one number per column."""
    rows = [line.as_dict() for line in found]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
