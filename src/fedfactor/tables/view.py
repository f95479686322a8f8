"""The rows as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedfactor.tables.row import VERDICTS, Printed, Row, Verdict

STYLES: dict[Verdict, str] = {
    "match": "green",
    "truncated": "green",
    "close": "yellow",
    "misprint": "magenta",
    "off": "bold red",
}


def render(rows: Sequence[Row]) -> RenderableType:
    """Return one terminal table per table of the papers, ours beside theirs, and the number of each verdict."""
    parts: list[RenderableType] = []
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.paper, row.table), []).append(row)
    for (paper, table), group in groups.items():
        parts += [_table(f"{paper}, {table}", group), ""]
    return Group(*parts, count_verdicts(rows))


def count_verdicts(rows: Sequence[Row]) -> Text:
    """Return the number of each verdict in one line."""
    counts = Counter(row.verdict for row in rows)
    counted = [Text(f"{counts[verdict]} {verdict}", STYLES[verdict]) for verdict in VERDICTS]
    return Text(f"{len(rows)} figures: ") + Text(", ").join(counted)


def _table(title: str, rows: Sequence[Row]) -> Table:
    """Return one table. Remarks are numbered and stand below it, since many rows share one."""
    remarks: dict[str, int] = {}
    view = Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
    # Narrow, so that most rows need one line at 80 columns.
    view.box, view.padding, view.pad_edge = SIMPLE, (0, 1, 0, 0), False
    for heading in ("row", "quantity"):
        view.add_column(heading)
    for heading in ("ours", "printed", "error"):
        view.add_column(heading, justify="right", no_wrap=True)
    view.add_column("verdict", no_wrap=True)
    for row in rows:
        verdict = Text(row.verdict, STYLES[row.verdict])
        if row.remark:
            verdict.append(f" {remarks.setdefault(row.remark, len(remarks) + 1)}", "dim")
        error = "" if Printed.parse(row.printed).bound else f"{100 * row.relative_error:+z.2f} %"
        view.add_row(Text(row.row), row.quantity, _figure(row), row.printed, error, verdict)
    if remarks:
        view.caption = Text("\n".join(f"{number}  {remark}" for remark, number in remarks.items()))
    return view


def _figure(row: Row) -> str:
    """Format our figure like the printed one, with two more digits."""
    printed = Printed.parse(row.printed)
    unit = row.printed.lstrip("<> ").lstrip("0123456789.,").strip()
    whole = isinstance(row.ours, int) and not unit
    digits = f"{row.ours:,}" if whole else f"{row.ours / printed.scale:,.{printed.decimals + 2}f}"
    return f"{digits} {unit}".strip()
