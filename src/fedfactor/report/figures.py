"""Write the figures of the report as vector graphics for a paper, with matplotlib.

They are drawn from the same traces as the page. plotly's own export needs a Chrome or Chromium browser; matplotlib
needs nothing outside of Python, and embeds its fonts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from fedfactor.report.elements import Element, Figure, Fold, Section
from fedfactor.report.plots import DASHES

WIDTH, HEIGHT, TALL = 3.5, 2.4, 3.3
"""Inches: one column of a paper. The legend is added to the height."""
LEGEND_ROW = 0.17
CHARACTERS = 48
"""How many characters of a legend fit in one row."""
KEY = 6
"""The line beside a name in the legend takes as much room as this many characters."""
LINE = 2
"""Width of the page's lines in pixels; wider ones are wider here too."""
LARGEST_DOT = 9
"""Diameter in points."""
STYLE: dict[Any, Any] = {
    "font.size": 8,  # points, as in a caption
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#d5dae3",
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "lines.scale_dashes": False,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fedfactor",  # the same figure is the same file
}


def write_figures(sections: Iterable[Section], folder: Path, kind: str) -> list[Path]:
    """Write each figure as `NAME.pdf` or `NAME.svg` into a folder; `kind` is `pdf` or `svg`. Return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in (one for section in sections for one in _figures(section.elements)):
        path = folder / f"{figure.name}.{kind}"
        about = {"pdf": ("Subject", "CreationDate"), "svg": ("Description", "Date")}[kind]
        with mpl.rc_context(STYLE):
            _draw(figure).savefig(path, metadata={"Title": figure.title, about[0]: figure.caption, about[1]: None})
        written.append(path)
    return written


def _figures(elements: Iterable[Element]) -> Iterator[Figure]:
    for element in elements:
        if isinstance(element, Figure):
            yield element
        elif isinstance(element, Fold):
            yield from _figures(element.elements)


def _draw(figure: Figure) -> Canvas:
    plot = figure.plot.to_plotly_json()
    canvas = Canvas(figsize=(WIDTH, TALL if figure.tall else HEIGHT), layout="constrained")
    axes = canvas.add_subplot()
    traces = plot["data"]
    bars = [trace for trace in traces if trace["type"] == "bar"]
    if bars:
        _bars(axes, bars)
    for trace in traces:
        if trace["type"] == "heatmap":
            most = max(abs(value) for row in trace["z"] for value in row)
            places = range(len(trace["z"]))
            image = axes.pcolormesh(places, places, trace["z"], cmap="RdBu_r", vmin=-most, vmax=most)
            axes.set(aspect="equal", ylim=(len(places) - 0.5, -0.5))  # the first row on top, as in a printed matrix
            bar = canvas.colorbar(image, label="inner product", shrink=0.7)
            assert bar.solids is not None
            bar.solids.set_rasterized(False)
        elif trace["type"] == "scatter":
            _scatter(axes, trace)
    _set_axis(axes, "x", plot["layout"].get("xaxis", {}))
    _set_axis(axes, "y", plot["layout"].get("yaxis", {}))
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        columns = max(1, min(len(labels), CHARACTERS // (max(map(len, labels)) + KEY)))
        canvas.legend(handles, labels, loc="outside upper center", ncols=columns)
        canvas.set_figheight(canvas.get_figheight() + LEGEND_ROW * -(-len(labels) // columns))
    return canvas


def _scatter(axes: Axes, trace: Mapping[str, Any]) -> None:
    """Draw a line with its label, the band of a line, or dots of different sizes with a legend of the sizes."""
    xs, ys = trace["x"], trace["y"]
    if trace.get("fill") == "toself":
        *rgb, alpha = map(float, re.findall(r"[\d.]+", trace["fillcolor"]))
        axes.fill(xs, ys, color=[value / 255 for value in rgb], alpha=alpha, linewidth=0)
    elif isinstance(trace["marker"].get("size"), Sequence):
        sizes = trace["marker"]["size"]
        area = LARGEST_DOT**2 / max(sizes, default=1)
        axes.scatter(xs, ys, [area * size for size in sizes], color=trace["marker"]["color"], linewidth=0)
        axes.locator_params(axis="x", integer=True)  # clients
        for size in dict.fromkeys([max(1, max(sizes, default=1) // 4), max(sizes, default=1)]):
            label = f"{size} examples"
            axes.scatter([], [], area * size, color=trace["marker"]["color"], linewidth=0, label=label)
    else:
        dashes = tuple(map(float, DASHES[trace["line"].get("dash", "solid")].split()))
        marker = "o" if "markers" in trace["mode"] else ""
        style: Any = (0, dashes) if dashes else "solid"
        width = trace["line"].get("width", LINE)  # pixels
        look = {"linestyle": style, "marker": marker, "color": trace["line"]["color"], "solid_capstyle": "butt"}
        if width > LINE:  # a bar of a timeline
            look["linewidth"] = width / LINE
        axes.plot(xs, ys, label=unescape(trace["name"]), **look)


def _bars(axes: Axes, bars: Sequence[Mapping[str, Any]]) -> None:
    """Draw groups of bars: one group per category, one bar per trace that has the category."""
    categories = list(dict.fromkeys(unescape(x) for trace in bars for x in trace["x"]))
    having = {name: [trace for trace in bars if name in map(unescape, trace["x"])] for name in categories}
    for trace in bars:
        places, widths = [], []
        for name in map(unescape, trace["x"]):
            slots = len(having[name])
            places.append(categories.index(name) + 0.8 * ((having[name].index(trace) + 0.5) / slots - 0.5))
            widths.append(0.8 / slots)
        whiskers = trace.get("error_y") or {}
        errors = [[value or 0 for value in whiskers[side]] for side in ("arrayminus", "array")] if whiskers else None
        heights = [float("nan") if value is None else value for value in trace["y"]]
        label, colour = unescape(trace["name"]), trace["marker"]["color"]
        axes.bar(places, heights, widths, yerr=errors, color=colour, label=label, error_kw={"elinewidth": 0.8})
    axes.grid(False, axis="x")
    if {unescape(trace["name"]) for trace in bars} == set(categories):
        axes.set_xticks([])  # the legend names the bars
    else:
        turned: dict[str, Any] = {"rotation": 45, "ha": "right"} if sum(map(len, categories)) > CHARACTERS else {}
        axes.set_xticks(range(len(categories)), categories, **turned)


def _set_axis(axes: Axes, which: str, layout: Mapping[str, Any]) -> None:
    axes.set(**{f"{which}label": layout.get("title", {}).get("text", "")})
    limits = getattr(axes, f"set_{which}lim")
    if "range" in layout:
        limits(*layout["range"])
    elif layout.get("rangemode") == "tozero":
        limits(0, None)
    if "tickvals" in layout:
        axes.set(**{f"{which}ticks": layout["tickvals"], f"{which}ticklabels": map(unescape, layout["ticktext"])})
    if layout.get("zeroline"):
        axes.axhline(0, color="#566074", linewidth=0.8)
