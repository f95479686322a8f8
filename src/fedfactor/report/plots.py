"""Plots: the colours of groups, and plotly's objects for lines with bands, bars and whole figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.colors import hex_to_rgb

from fedfactor.report.elements import Figure, Table
from fedfactor.report.groups import Group, Mean, written
from fedfactor.report.values import Format, four_digits, percent, thin
from fedfactor.task import Decider

COLOURS = ("#1f77d0", "#d9541e", "#1c9a5b", "#a460d8", "#b27d0a", "#d6407f", "#128f9e", "#8a6d5b", "#6d7f0d", "#7583c4")
"""Each has a contrast of at least 3:1 with the light and with the dark background (a test checks this)."""
DASHES = {"solid": "", "dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3", "longdash": "10 4"}
"""plotly's names and, for the legend, the same as SVG's `stroke-dasharray`."""
MOST_POINTS = 250
MOST_ROWS = 60
FEW_POINTS = 5
"""A line with at most this many points also shows the points."""


@dataclass(frozen=True)
class Scale:
    """How the values of an axis are drawn and written."""

    title: str
    text: Format = four_digits
    hover: str = "%{y:.4g}"
    factor: float = 1.0
    least: float = -math.inf
    most: float = math.inf


def scale_of(decider: Decider) -> Scale:
    """Return how the values of a metric are drawn."""
    if decider.is_share:
        return Scale(f"{decider.name} in per cent", percent, "%{y:.2f} %", 100.0, 0.0, 1.0)
    return Scale(decider.name)


@dataclass(frozen=True)
class Curve:
    """A line through means, with its style."""

    label: str
    points: Sequence[tuple[float, Mean]]
    colour: str
    dash: str
    group: int | None = None
    """The number of the group that the reader can hide, if the line belongs to one."""

    @classmethod
    def of(cls, group: Group, points: Sequence[tuple[float, Mean]]) -> Curve:
        """Return the line of a group."""
        return cls(group.label, points, colour(group.number), dash(group.number), group.number)


def colour(number: int) -> str:
    """Return the colour of a group."""
    return COLOURS[number % len(COLOURS)]


def dash(number: int) -> str:
    """Return the dash pattern of a group. The first 50 groups differ in colour or in pattern."""
    return list(DASHES)[(number + number // len(COLOURS)) % len(DASHES)]


def plain(text: str) -> str:
    """Escape text for plotly, which interprets some HTML tags in labels."""
    return escape(text, quote=False)


def rounded(values: Sequence[float | None]) -> list[float | None]:
    """Round to six significant digits, more than a screen shows, to keep the page small."""
    return [None if value is None else float(f"{value:.6g}") for value in values]


def line(
    label: str, xs: Sequence[float], ys: Sequence[float], colour: str, dash: str, hover: str, **options: Any
) -> go.Scatter:
    """Draw a line, or a marker if there is a single point. `hover` follows the label in the text shown on hover."""
    return go.Scatter(
        mode="markers" if len(xs) == 1 else "lines+markers" if len(xs) <= FEW_POINTS else "lines",
        x=rounded(xs),
        y=rounded(ys),
        name=plain(label),
        line={"color": colour, "dash": dash, "width": 2},
        marker={"color": colour},
        hovertemplate=f"%{{fullData.name}}<br>{hover}<extra></extra>",
        **options,
    )


def traces(curve: Curve, scale: Scale, x: str = "round %{x}") -> list[go.Scatter]:
    """Draw a curve, and below it a band for the 95 % intervals, cut off at the scale's limits."""
    points = thin(curve.points, MOST_POINTS)
    xs, ys = [x for x, _ in points], [scale.factor * one.value for _, one in points]
    hover = f"{x}: {scale.hover}"
    drawn = [line(curve.label, xs, ys, curve.colour, curve.dash, hover, meta=curve.group)] if points else []
    ends = [(x, one.value - one.half, one.value + one.half) for x, one in points if one.half is not None]
    if not ends:
        return drawn
    upper = [(x, scale.factor * min(scale.most, high)) for x, _, high in ends]
    lower = [(x, scale.factor * max(scale.least, low)) for x, low, _ in ends]
    outline = [*upper, *reversed(lower)]
    xs, ys, faint = [x for x, _ in outline], [y for _, y in outline], f"rgba{(*hex_to_rgb(curve.colour), 0.13)}"
    band = go.Scatter(mode="lines", x=rounded(xs), y=rounded(ys), fill="toself", fillcolor=faint, line={"width": 0})
    return [band.update(hoverinfo="skip", showlegend=False, meta=curve.group), *drawn]


def bars(
    group: Group, xs: Sequence[str], values: Sequence[Mean | None], factor: float = 1.0, hover: str = "%{y}"
) -> go.Bar:
    """Draw a group's means as bars with whiskers for their 95 % intervals. Whiskers do not go below 0."""
    heights = rounded([None if one is None else factor * one.value for one in values])
    halves = rounded([None if one is None or one.half is None else factor * one.half for one in values])
    below = [None if a is None or b is None else min(a, b) for a, b in zip(halves, heights, strict=True)]
    whiskers = {"symmetric": False, "array": halves, "arrayminus": below, "thickness": 1.5, "color": "#808a9d"}
    return go.Bar(
        x=[plain(x) for x in xs],
        y=heights,
        error_y=whiskers if any(halves) else None,
        name=plain(group.label),
        marker={"color": colour(group.number)},
        hovertemplate=hover,
        meta=group.number,
    )


def figure(
    name: str, title: str, caption: str, drawn: Sequence[Any], axes: tuple[str, str], table: Table, **layout: Any
) -> Figure:
    """Return a figure. `axes` are the titles of the axes; `layout` takes plotly's options such as `xaxis_range`."""
    plot = go.Figure(drawn, go.Layout(xaxis_title_text=axes[0], yaxis_title_text=axes[1], **layout))
    plot.layout.template = None  # the page has its own colours, and a template would add 6.5 kB to each figure
    return Figure(name, title, caption, plot, table)


def over_rounds(
    name: str, title: str, caption: str, curves: Sequence[Curve], scale: Scale, table: str, **layout: Any
) -> Figure:
    """Return a figure of curves over rounds. Its table has one row per round and one column per curve."""
    there = [dict(curve.points) for curve in curves]
    rounds = thin(sorted({round for points in there for round in points}), MOST_ROWS)
    rows = [[f"{round:.0f}", *(written(points.get(round), scale.text) for points in there)] for round in rounds]
    behind = Table(["round", *(curve.label for curve in curves)], rows, table + thinned(rows))
    drawn = [trace for curve in curves for trace in traces(curve, scale)]
    return figure(name, title, caption, drawn, ("round", scale.title), behind, xaxis_rangemode="tozero", **layout)


def thinned(rows: Sequence[object]) -> str:
    """Return a remark for the caption of a table that may not show all rows."""
    return f" ({len(rows)} rows selected; metrics.jsonl of the runs has all)" if len(rows) >= MOST_ROWS else ""
