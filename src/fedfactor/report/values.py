"""Numbers as text, their units, and thinning of long lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

Item = TypeVar("Item")
Format = Callable[[float], str]
Units = Sequence[tuple[float, str, str]]

UNITS: dict[str, Units] = {
    "bytes": ((1e9, "GB", "gigabytes"), (1e6, "MB", "megabytes"), (1e3, "kB", "kilobytes"), (1.0, "B", "bytes")),
    "time": ((3600.0, "hours", "hours"), (60.0, "minutes", "minutes"), (1.0, "seconds", "seconds")),
    "energy": ((1.0, "joules", "energy"),),
    "epsilon": ((1.0, "epsilon", "epsilon"),),
}
UNITS["simulated time"] = [(size, unit, f"simulated {name}") for size, unit, name in UNITS["time"]]
"""Units by quantity, the largest first: size, symbol and name."""


def unit_for(values: Iterable[float], units: Units) -> tuple[float, str, str]:
    """Return the largest unit in which some value is at least 1: its size, symbol and name."""
    largest = max(values, default=0.0)
    return next((unit for unit in units if largest >= unit[0]), units[-1])


def percent(value: float) -> str:
    """Format a share as a percentage."""
    return f"{100 * value:.2f} %"


def four_digits(value: float) -> str:
    """Format a number with four significant digits."""
    return f"{value:.4g}"


def amount(value: float, unit: str = "") -> str:
    """Format a number with three significant digits and an SI prefix."""
    for power, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * power:  # below this it is not rounded up to 1000 of the next smaller prefix
            return f"{value / power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


size = partial(amount, unit="B")
joules = partial(amount, unit="J")


def span(seconds: float) -> str:
    """Format a duration in days, hours, minutes or seconds."""
    for length, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.3g} s"


def slug(text: str) -> str:
    """Return text that can name a file: letters, digits and a few signs."""
    return re.sub(r"[^\w.=+-]+", "-", text).strip("-")


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def thin(items: Sequence[Item], most: int) -> list[Item]:
    """Select at most `most` items, evenly spaced. The first and the last are always among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
