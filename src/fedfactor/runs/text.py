"""Formatting of numbers and tables."""

from __future__ import annotations

import math
from typing import Any

from rich import box

SPARE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD, "show_edge": False, "padding": (0, 0), "title_justify": "left", "title_style": "bold",
    "caption_justify": "left",
}  # fmt: skip
"""Style of a table with many columns on a terminal of 80 characters."""


def plain(value: float) -> str:
    """Format a number with three significant digits, or with all digits before the decimal point if there are more.

    NaN, a number that is not known, is a dash.
    """
    if math.isnan(value):
        return "-"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1g}"
