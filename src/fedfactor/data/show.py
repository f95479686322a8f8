"""Who has how much of what: a table of counts, and a plot of dots as in FedDecomp's Figure 8."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedfactor.task import FederatedData

DOTS = "·∘○◉●"
STYLES = ("dim", "cyan", "cyan", "bold cyan", "bold bright_cyan")
WIDE = 20
"""More classes than this have no room for their amounts beside the dots."""

Counts = NDArray[np.int64]


def counts(data: FederatedData, classes: int = 0, *, test: bool = False) -> Counts:
    """Count the examples of every client (rows) and class (columns); of their own test sets with `test`."""
    examples = data.central if test else data.train
    parts = data.test_of if test else data.train_of
    if examples is None or parts is None:
        return np.zeros((data.clients, classes), np.int64)
    targets = examples[1]
    found = [np.bincount(targets[part].numpy(), minlength=classes) for part in parts]
    width = max([classes, *(len(row) for row in found)])
    return np.stack([np.pad(row, (0, width - len(row))) for row in found]).astype(np.int64)


def draw(
    data: FederatedData, classes: Sequence[str] | int = 0, *, most: int = 50, title: str = "", test: bool = False
) -> RenderableType:
    """Draw a dot for every client and class, the larger the more examples, with the amounts beside it.

    `most` is the number of clients shown; the totals are of all. With many classes the amounts are in the legend only.
    """
    names = [str(label) for label in range(classes)] if isinstance(classes, int) else [str(name) for name in classes]
    table_of = counts(data, len(names), test=test)
    names += [str(label) for label in range(len(names), table_of.shape[1])]
    names = [_visible(name) for name in names]
    bounds = _bounds(table_of)
    wide = len(names) <= WIDE
    table = Table(title=title or None, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("client", justify="right", no_wrap=True)
    if wide:
        for name in names:
            table.add_column(name[:5], justify="right", no_wrap=True)  # ten classes fit a line of 80 characters
    else:
        table.add_column(f"{names[0]} … {names[-1]} ({len(names)} classes)", no_wrap=False, overflow="fold")
    table.add_column("all", justify="right", no_wrap=True)
    table.add_column("classes", justify="right", no_wrap=True)
    for client, row in enumerate(table_of[:most]):
        dots = [_dot(int(amount), bounds, wide) for amount in row]
        cells = dots if wide else [Text("").join(dots)]
        table.add_row(str(client), *cells, short(int(row.sum())), str(np.count_nonzero(row)))
    if len(table_of) > most:
        table.add_row("…")
    sums = [Text(short(int(amount))) for amount in table_of.sum(0)] if wide else [Text("")]
    table.add_row("all", *sums, short(int(table_of.sum())), str(np.count_nonzero(table_of.sum(0))), style="bold")
    return Group(table, _legend(table_of, bounds))


def _bounds(table: Counts) -> list[int]:
    """Return the largest amount of every size of dot: areas grow with amounts, so sizes go by the square root."""
    top = int(table.max(initial=1))
    return [max(size, round(top * ((size + 1) / len(DOTS)) ** 2)) for size in range(len(DOTS) - 1)] + [top]


def _dot(amount: int, bounds: list[int], wide: bool) -> Text:
    if not amount:
        return Text("" if wide else " ")
    size = next((number for number, bound in enumerate(bounds) if amount <= bound), len(DOTS) - 1)
    return Text(f"{short(amount)}{DOTS[size]}" if wide else DOTS[size], style=STYLES[size])


def short(amount: int) -> str:
    """Write an amount in at most four characters: 999, 1.2k, 34k."""
    if amount < 1000:
        return str(amount)
    return f"{amount / 1000:.1f}k" if amount < 9950 else f"{amount / 1000:.0f}k"


def _legend(table: Counts, bounds: list[int]) -> Text:
    sizes = table.sum(1)
    entries = [f"{DOTS[0]} 1–{bounds[0]:,}"] if bounds[0] else []
    for dot, (low, high) in zip(DOTS[1:], pairwise(bounds), strict=True):
        if high > low:
            entries.append(f"{dot} {low + 1:,}–{high:,}")
    middle = np.median(sizes)
    spread = f"{len(sizes):,} clients with {sizes.min():,} to {sizes.max():,} examples, {middle:,.0f} at the median"
    return Text("   ".join([*entries, spread]), style="dim")


def _visible(name: str) -> str:
    """Write out characters that would move the cursor: letters are classes too."""
    return name if name.isprintable() and name.strip() else repr(name)
