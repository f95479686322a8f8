"""Numbers and tables as text."""

from __future__ import annotations

from typing import Any

from rich import box

SPARE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD, "show_edge": False, "padding": (0, 0), "title_justify": "left", "title_style": "bold",
    "caption_justify": "left",
}  # fmt: skip
"""Looks of a table of many columns on a screen of 80."""


def plain(value: float) -> str:
    """Write a number with three digits, or all before the point, without an exponent."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1g}"
