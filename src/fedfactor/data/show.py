"""How examples are distributed: counts per client and class, and a dot plot as in FedDecomp's Figure 8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fedfactor.data.clients import Examples, FederatedData, count
from fedfactor.data.records import Records

DOTS = "·∘○◉●"
STYLES = ("dim", "cyan", "cyan", "bold cyan", "bold bright_cyan")
Counts = NDArray[np.int64]


def counts(data: FederatedData, classes: int = 0, *, test: bool = False, most: int | None = None) -> Counts:
    """Count the examples per client (rows) and class (columns). Without classes there is one column.

    So it is for datasets that do not list their `targets`, unless their classes were read before.

    Args:
        data: The distributed data.
        classes: Least number of columns.
        test: Count the clients' own test examples instead of their training examples.
        most: Count only the first clients, this many.
    """
    examples = data.central if test else data.train
    parts = data.test_of if test else data.train_of
    if examples is None or parts is None:
        return np.zeros((data.clients, classes), np.int64)
    targets = _classes_of(examples)
    found = [np.bincount(targets[parts[client]].numpy(), minlength=classes) for client in range(len(parts))[:most]]
    width = max([classes, *(len(row) for row in found)])
    return np.stack([np.pad(row, (0, width - len(row))) for row in found]).astype(np.int64)


def _classes_of(examples: Examples) -> Tensor:
    """Return one class per example; all are 0 if targets are not classes, or if examples had to be read for them."""
    targets = examples.known_targets() if isinstance(examples, Records) else examples[1]
    if targets is None or targets.dim() != 1 or targets.is_floating_point():
        return torch.zeros(count(examples), dtype=torch.int64)
    return targets.long()


def draw(
    data: FederatedData, classes: Sequence[str] | int = 0, *, most: int = 50, title: str = "", test: bool = False
) -> Plot:
    """Return a plot with one dot per client and class: the more examples, the larger the dot.

    It shows at most `most` clients. The totals count all clients.
    """
    names = [str(label) for label in range(classes)] if isinstance(classes, int) else [str(name) for name in classes]
    table = counts(data, len(names), test=test)
    names += [str(label) for label in range(len(names), table.shape[1])] if table.shape[1] > 1 else ["examples"]
    return Plot(table, [_visible(name) for name in names], most, title)


@dataclass(frozen=True)
class Plot:
    """A plot for a terminal. Numbers stand beside the dots if the line is long enough, otherwise only in the legend."""

    counts: Counts
    names: Sequence[str]
    most: int = 50
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bounds = _bounds(self.counts)
        table = self._table(bounds, amounts=True)
        if Measurement.get(console, options.update(max_width=10_000), table).maximum > options.max_width:
            table = self._table(bounds, amounts=False)
        yield table
        yield _legend(self.counts, bounds)

    def _table(self, bounds: list[int], *, amounts: bool) -> Table:
        table = Table(title=self.title or None, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("client", justify="right", no_wrap=True)
        if amounts:
            for name in self.names:
                table.add_column(name[:5], justify="right", no_wrap=True)  # ten classes fit a line of 80 characters
        else:
            head = f"{self.names[0]} … {self.names[-1]} ({len(self.names)} classes)"
            table.add_column(head, no_wrap=False, overflow="fold")
        table.add_column("all", justify="right", no_wrap=True)
        table.add_column("classes", justify="right", no_wrap=True)
        for client, row in enumerate(self.counts[: self.most]):
            dots = [_dot(int(amount), bounds, amounts) for amount in row]
            cells = dots if amounts else [Text("").join(dots)]
            table.add_row(str(client), *cells, short(int(row.sum())), str(np.count_nonzero(row)))
        if len(self.counts) > self.most:
            table.add_row("…")
        total = self.counts.sum(0)
        sums = [Text(short(int(amount))) for amount in total] if amounts else [Text("")]
        table.add_row("all", *sums, short(int(total.sum())), str(np.count_nonzero(total)), style="bold")
        return table


def _bounds(table: Counts) -> list[int]:
    """Return the largest number per size of dot: areas grow with numbers, so diameters grow with their square root."""
    top = int(table.max(initial=1))
    return [max(size, round(top * ((size + 1) / len(DOTS)) ** 2)) for size in range(len(DOTS) - 1)] + [top]


def _dot(amount: int, bounds: list[int], with_amount: bool) -> Text:
    if not amount:
        return Text("" if with_amount else " ")
    size = next((number for number, bound in enumerate(bounds) if amount <= bound), len(DOTS) - 1)
    return Text(f"{short(amount)}{DOTS[size]}" if with_amount else DOTS[size], style=STYLES[size])


def short(amount: int) -> str:
    """Format a number in at most four characters: 999, 1.2k, 34k."""
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
    """Escape characters that would move the cursor: characters of a text are classes too."""
    return name if name.isprintable() and name.strip() else repr(name)
