"""What is not a plot: failures, recovered pictures, how it was measured, and recipes in full."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from fedfactor.report.groups import Group
from fedfactor.report.parts import Code, Fold, Piece, Section, Table, Text, thin
from fedfactor.report.read import RunData
from fedfactor.runs.directory import RunError

MOST_FAILURES = 200
MOST_PICTURES = 100
BASE64 = re.compile(r"[A-Za-z0-9+/]+=*")


def failures(groups: Sequence[Group]) -> Section:
    """Return whose updates were not used, and why."""
    runs = [run for group in groups for run in group.runs if run.failures]
    if not runs:
        return Section("failures", "Failures", [Text("None: every client that was asked has answered well.")])
    reasons = [[run.name, reason, str(count)] for run in runs for reason, count in run.common_failures()[:20]]
    rows = [[run.name, str(round), str(client), reason] for run in runs for round, client, reason in run.failures]
    more = f" (the first {MOST_FAILURES} of {len(rows)})" if len(rows) > MOST_FAILURES else ""
    each = Table(["run", "round", "client", "reason"], rows[:MOST_FAILURES], f"Updates that were not used{more}")
    why = Table(["run", "reason", "times"], reasons, "Reasons of failures")
    return Section("failures", "Failures", [why, Fold("One by one", [each])])


def audits(groups: Sequence[Group]) -> Section | None:
    """Return what `fedfactor audit` has recovered, where it has been run."""
    pieces: list[Piece] = []
    for group in groups:
        for run in group.runs:
            for path in sorted(run.directory.glob("audit-*.json")):
                pieces += _audit(run, path)
    return Section("audit", "Pictures recovered from uploads", pieces) if pieces else None


def _audit(run: RunData, path: Path) -> list[Piece]:
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [("all", found["psnr"]), *((f"round {round}", one) for round, one in found["rounds"].items())]
    cells = [[name, *(f"{value:.2f}" for value in figures.values())] for name, figures in rows]
    title = f"{run.name}, {found['attack']['mode']}: PSNR in dB, higher is closer; flat is a picture of one colour"
    table = Table(["", *(name.replace("_", " ") for name in found["psnr"])], cells, title)
    pairs = [
        (original, recovered, f"round {one['round']}, client {one['client']}: {decibel:.1f} dB")
        for one in found["attacks"]
        for original, recovered, decibel in zip(
            one.get("originals", ()), one.get("recovered", ()), one["psnr"], strict=False
        )
    ]
    shown = thin(pairs, MOST_PICTURES)
    of_all = f" ({len(shown)} of {len(pairs)}; all are in {path.stem}.html)" if len(shown) < len(pairs) else ""
    return [table, *([Fold(f"{run.name}: pictures{of_all}", [Pictures(shown)])] if shown else [])]


@dataclass(frozen=True)
class Pictures:
    """Originals above what was recovered of them, as PNG files in base64, with what is said of each pair."""

    pairs: Sequence[tuple[str, str, str]]

    def __post_init__(self) -> None:
        if not all(BASE64.fullmatch(picture) for pair in self.pairs for picture in pair[:2]):
            raise RunError("an audit's pictures should be PNG files in base64")

    def html(self) -> str:
        """Return it as HTML."""
        shown = "".join(
            f'<figure><img alt="original {i}" src="data:image/png;base64,{original}">'
            f'<img alt="recovered {i}" src="data:image/png;base64,{recovered}">'
            f"<figcaption>{escape(words)}</figcaption></figure>"
            for i, (original, recovered, words) in enumerate(self.pairs, 1)
        )
        return f'<p>Above the client\'s own picture, below what was recovered.</p><div class="pictures">{shown}</div>'


def protocol(groups: Sequence[Group]) -> Section:
    """Return how everything was measured: a row a figure, or several where runs differ in it."""
    runs = [run for group in groups for run in group.runs]
    said: dict[str, dict[str, list[str]]] = {}
    for group in groups:
        for run in group.runs:
            for key, value in run.protocol.items():
                names = said.setdefault(key, {}).setdefault(str(value), [])
                names.append(group.label if len({str(one.protocol.get(key)) for one in group.runs}) == 1 else run.name)
    rows = [
        [key.replace("_", " "), value, "all" if len(names) == len(runs) else ", ".join(dict.fromkeys(names))]
        for key, ways in said.items()
        for value, names in ways.items()
    ]
    return Section("protocol", "How it was measured", [Table(["figure", "meaning", "runs"], rows, "What figures mean")])


def recipes(groups: Sequence[Group]) -> Section:
    """Return the resolved recipe of every run, in full, and what the paper prints for it."""
    pieces: list[Piece] = []
    for group in groups:
        for run in group.runs:
            pieces.append(Fold(f"{group.label}: {run.name}", [Code(run.recipe, f"recipe of {run.name}")]))
    return Section("recipes", "Recipes in full", pieces)
