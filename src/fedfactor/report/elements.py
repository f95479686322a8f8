"""What a page is made of. The macros in templates/elements.html.j2 turn each element into HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class Element:
    """Anything that a section can hold. The macro that renders it has the name of its class."""


@dataclass(frozen=True)
class Table(Element):
    """Rows of text below a header row. The first cell of each row is its heading."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


@dataclass(frozen=True)
class Text(Element):
    """A paragraph."""

    words: str


@dataclass(frozen=True)
class Figure(Element):
    """A plot, drawn once the reader scrolls to it, and a table of the plotted numbers."""

    name: str
    """Unique on the page; becomes the element's id."""
    title: str
    caption: str
    plot: Any
    """A `plotly.graph_objects.Figure`."""
    table: Table
    tall: bool = False


@dataclass(frozen=True)
class Fold(Element):
    """Elements below a title that the reader can open and close."""

    title: str
    elements: Sequence[Element]
    opened: bool = False


@dataclass(frozen=True)
class Code(Element):
    """Preformatted text."""

    text: str
    label: str


@dataclass(frozen=True)
class Pictures(Element):
    """Pairs of pictures, one above the other."""

    pairs: Sequence[tuple[str, str, str]]
    """The original and the recovered picture as PNG files in base64, and a caption."""


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading and an entry in the page's menu."""

    name: str
    title: str
    elements: Sequence[Element] = field(default_factory=list)
