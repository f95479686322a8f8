"""Words, numbers and looks that messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from rich import box

SPARE: dict[str, Any] = {
    "box": box.SIMPLE_HEAD, "show_edge": False, "padding": (0, 0), "title_justify": "left", "title_style": "bold",
    "caption_justify": "left",
}  # fmt: skip
"""Looks of a table of many columns on a screen of 80."""


def near(word: str, legal: Iterable[str], hint: str = "did you mean {!r}? ") -> str:
    """Return a hint at the legal word that is most like a wrong one; nothing if none is."""
    known = list(legal)
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5) or [one for one in known if one.startswith(word)]
    return hint.format(found[0]) if found and word else ""


def plain(value: float) -> str:
    """Write a number with three digits, or all before the point, without an exponent."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1g}"
