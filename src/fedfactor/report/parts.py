"""What a page is made of: tables, figures with a table behind each, sections; all text is escaped here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Protocol

from fedfactor.report.groups import Group, Mean
from fedfactor.report.read import Point

COLOURS = ("#1f77d0", "#d9541e", "#1c9a5b", "#a460d8", "#b27d0a", "#d6407f", "#128f9e", "#8a6d5b", "#6d7f0d", "#7583c4")
"""Each is at least three times as light or dark as either background (a test counts)."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MOST_POINTS = 250
MOST_ROWS = 60


class Piece(Protocol):
    """Anything a section can hold."""

    def html(self) -> str:
        """Return it as HTML."""
        ...


@dataclass(frozen=True)
class Table:
    """Rows of text under a head; the first cell of a row names it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str

    def html(self) -> str:
        """Return a table that scrolls by itself, also by keyboard, where the page is too narrow."""
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.head)
        rows = "".join(
            f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
            for first, *rest in self.rows
        )
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.caption)}"><table>'
            f"<caption><span>{escape(self.caption)}</span></caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        )


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    words: str

    def html(self) -> str:
        """Return it as HTML."""
        return f"<p>{escape(self.words)}</p>"


@dataclass(frozen=True)
class Figure:
    """A plot that is drawn when it is scrolled to, and the table behind it."""

    name: str
    """Unique on the page, fit for an id."""
    title: str
    caption: str
    traces: Sequence[dict[str, Any]]
    layout: dict[str, Any]
    table: Table
    tall: bool = False

    def html(self) -> str:
        """Return the figure, its data, and its table folded away."""
        data = script_json({"data": list(self.traces), "layout": self.layout})
        described = f"{self.title}. {self.caption} The table below has the numbers."
        return (
            f'<figure id="{self.name}"><h3>{escape(self.title)}</h3>'
            f'<div role="img" aria-label="{escape(described)}">'
            f'<div class="plot{" tall" if self.tall else ""}" aria-hidden="true"></div></div>'
            f'<script type="application/json">{data}</script>'
            f"<figcaption>{escape(self.caption)}</figcaption>"
            f"<details><summary>Table: {escape(self.title)}</summary>{self.table.html()}</details></figure>"
        )


@dataclass(frozen=True)
class Fold:
    """Pieces that are shown on demand."""

    title: str
    pieces: Sequence[Piece]
    opened: bool = False

    def html(self) -> str:
        """Return it as HTML."""
        inner = "".join(piece.html() for piece in self.pieces)
        return f"<details{' open' if self.opened else ''}><summary>{escape(self.title)}</summary>{inner}</details>"


@dataclass(frozen=True)
class Code:
    """Text that keeps its lines."""

    text: str
    label: str

    def html(self) -> str:
        """Return it as HTML."""
        return f'<pre tabindex="0" role="region" aria-label="{escape(self.label)}">{escape(self.text)}</pre>'


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading that the menu leads to."""

    name: str
    title: str
    pieces: Sequence[Piece] = field(default_factory=list)

    def html(self) -> str:
        """Return it as HTML."""
        inner = "".join(piece.html() for piece in self.pieces)
        return (
            f'<section id="{self.name}" aria-labelledby="{self.name}-title">'
            f'<h2 id="{self.name}-title">{escape(self.title)}</h2>{inner}</section>'
        )


def script_json(value: Any) -> str:
    """Write JSON that cannot end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def label(text: str) -> str:
    """Write text for plotly, which reads some tags in it."""
    return escape(text, quote=False)


def colour(number: int) -> str:
    """Return the colour of a group."""
    return COLOURS[number % len(COLOURS)]


def faint(shade: str) -> str:
    """Make a colour that lets the background through."""
    red, green, blue = (int(shade[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.13)"


def dash(number: int) -> str:
    """Return the dashes of a group: together with the colour they tell groups apart without seeing colours."""
    return DASHES[(number + number // len(COLOURS)) % len(DASHES)]  # 50 pairs before one returns


def thin(points: Sequence[Any], most: int) -> list[Any]:
    """Take at most so many of the points, evenly, always the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def lines(
    group: Group,
    xs: Sequence[float],
    means: Sequence[Mean],
    *,
    hover: str,
    scale: float = 1.0,
    limits: tuple[float, float] = (-math.inf, math.inf),
) -> list[dict[str, Any]]:
    """Draw a group's mean as a line, over a band that is its 95 % interval, cut where no value can be."""
    least, most = limits
    band = [(x, one) for x, one in zip(xs, means, strict=True) if one.half is not None]
    traces: list[dict[str, Any]] = []
    if band:
        high = [number(scale * min(most, one.value + (one.half or 0))) for _, one in band]
        low = [number(scale * max(least, one.value - (one.half or 0))) for _, one in band]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [number(x) for x, _ in band] + [number(x) for x, _ in reversed(band)],
                "y": high + low[::-1],
                "fill": "toself",
                "fillcolor": faint(colour(group.number)),
                "line": {"width": 0},
                "hoverinfo": "skip",
                "showlegend": False,
                "meta": group.number,
            }
        )
    traces.append(
        {
            "type": "scatter",
            "mode": "lines" if len(xs) > 1 else "markers",
            "x": [number(x) for x in xs],
            "y": [number(scale * one.value) for one in means],
            "name": label(group.label),
            "line": {"color": colour(group.number), "dash": dash(group.number), "width": 2},
            "marker": {"color": colour(group.number)},
            "hovertemplate": hover,
            "meta": group.number,
        }
    )
    return traces


def bars(
    group: Group, xs: Sequence[str], values: Sequence[Mean | None], *, scale: float = 1.0, hover: str = "%{y}"
) -> dict[str, Any]:
    """Draw a group's means as bars with their intervals, which end at 0."""
    halves = [None if one is None or one.half is None else number(scale * one.half) for one in values]
    heights = [None if one is None else number(scale * one.value) for one in values]
    whiskers = {
        "type": "data",
        "symmetric": False,
        "array": halves,
        "arrayminus": [None if a is None or b is None else min(a, b) for a, b in zip(halves, heights, strict=True)],
        "thickness": 1.5,
        "color": "#808a9d",
    }
    return {
        "type": "bar",
        "x": [label(x) for x in xs],
        "y": heights,
        **({"error_y": whiskers} if any(halves) else {}),
        "name": label(group.label),
        "marker": {"color": colour(group.number)},
        "hovertemplate": hover,
        "meta": group.number,
    }


def axes(x: str, y: str, **more: Any) -> dict[str, Any]:
    """Return a layout with titles at its axes; `x_` and `y_` options go to the axis."""
    layout: dict[str, Any] = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    for key, value in more.items():
        axis, _, name = key.partition("_")
        if axis in ("x", "y") and name:
            layout[f"{axis}axis"][name] = value
        else:
            layout[key] = value
    return layout


def sentence(words: str) -> str:
    """Begin with a capital letter."""
    return words[:1].upper() + words[1:]


def number(value: float) -> float:
    """Round to six digits, which is more than a screen shows, so that the page stays small."""
    return float(f"{value:.6g}")


def at_or_before(series: Sequence[Point], round: int) -> float | None:
    """Return the value of a round, or of the last one before it."""
    found = [value for now, value in series if now <= round]
    return found[-1] if found else None


Units = Sequence[tuple[float, str, str]]
BYTES: Units = ((1e9, "GB", "gigabytes"), (1e6, "MB", "megabytes"), (1e3, "kB", "kilobytes"), (1.0, "B", "bytes"))
TIMES: Units = ((3600.0, "hours", "hours"), (60.0, "minutes", "minutes"), (1.0, "seconds", "seconds"))


def unit_for(values: Iterable[float], units: Units) -> tuple[float, str, str]:
    """Return the unit in which the largest of some values is at least one: its size, sign and name."""
    largest = max(values, default=0.0)
    return next((unit for unit in units if largest >= unit[0]), units[-1])


def percent(value: float) -> str:
    """Write a share as per cent."""
    return f"{100 * value:.2f} %"


def amount(value: float, unit: str = "") -> str:
    """Write a number with three digits and the prefix of a power of thousand."""
    size = abs(value)
    for power, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= 0.9995 * power:  # what would be written as 1000 of the prefix below
            return f"{value / power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def span(seconds: float) -> str:
    """Write a time in the unit that suits it."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"
