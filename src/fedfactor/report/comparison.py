"""Tables of a comparison over seeds: for a terminal, in LaTeX and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from fedfactor.report.groups import Mean, mean
from fedfactor.runs.compare import CellResult
from fedfactor.runs.text import SPARE, plain

MEASURED = {"all": "all clients' own", "global": "central", "selected_after": "cohort's own, just trained"}
"""Measurements by which methods can be compared; the first one that all of them have is used."""


@dataclass(frozen=True)
class Line:
    """Results of one method over its seeds: means, and half the widths of their 95 % intervals."""

    method: str
    seeds: int
    measured: str
    """Which test data the accuracy is measured on."""
    accuracy: Mean | None
    best: Mean | None
    bytes: float
    """Uploads and downloads per run."""
    ratio: float | None
    """Bytes of FedAvg (or of the method with the most bytes) divided by the bytes of this method."""
    macs: float
    client_failures: float
    failed: tuple[str, ...]
    """Seeds that failed, with the reason."""

    def as_dict(self) -> dict[str, Any]:
        """Return the line as a flat dictionary."""
        found: dict[str, Any] = {"method": self.method, "seeds": self.seeds, "measured": self.measured}
        for key, pair in (("accuracy", self.accuracy), ("best_accuracy", self.best)):
            found |= {f"{key}_mean": pair.value if pair else None, f"{key}_halfwidth": pair.half if pair else None}
        rest = {"bytes": self.bytes, "bytes_ratio": self.ratio, "macs": self.macs}
        return {**found, **rest, "client_failures": self.client_failures, "failed": "; ".join(self.failed)}


def lines(results: Sequence[CellResult]) -> list[Line]:
    """Summarise results by method, in the given order, using a measurement that all methods have if there is one."""
    there = [result.summary for result in results if result.summary is not None]
    common = next((key for key in MEASURED if there and all(key in one["measured"] for one in there)), None)
    found = []
    sizes: dict[str, float] = {}
    for method in dict.fromkeys(result.cell.method for result in results):
        mine = [result for result in results if result.cell.method == method]
        good = [result.summary for result in mine if result.summary is not None]
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


TEXT_COLUMNS = frozenset({"method", "test data"})
"""Columns that are aligned to the left, and escaped in LaTeX; all others hold numbers."""


def _columns(found: Sequence[Line], plus_minus: str) -> dict[str, list[str]]:
    """Return the cells of each column by its header; the column of test data is left out if all rows have the same."""

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
    """Return the comparison as a table for the terminal."""
    view = Table(caption=_caption(found), **{**SPARE, "padding": (0, 0, 0, 1)})
    columns = _columns(found, "±")
    for head in columns:
        view.add_column(head, justify="left" if head in TEXT_COLUMNS else "right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        view.add_row(*row)
    return view


def latex(found: Sequence[Line]) -> str:
    """Return the comparison as a LaTeX table, with its caption as a comment above."""
    columns = _columns(found, r"$\pm$")
    for name in columns.keys() & TEXT_COLUMNS:
        columns[name] = [_escaped(cell) for cell in columns[name]]
    sides = "".join("l" if head in TEXT_COLUMNS else "r" for head in columns)
    head = _latex_row([_escaped(head) for head in columns])
    body = [_latex_row(row) for row in zip(*columns.values(), strict=True)]
    parts = [f"% {_caption(found)}", rf"\begin{{tabular}}{{{sides}}}", r"\hline", head, r"\hline", *body]
    return "\n".join([*parts, r"\hline", r"\end{tabular}"]) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _escaped(text: str) -> str:
    return "".join(f"\\{sign}" if sign in "&%$#_{}" else sign for sign in text)


def csv_text(found: Sequence[Line]) -> str:
    """Return the comparison as CSV."""
    rows = [line.as_dict() for line in found]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
