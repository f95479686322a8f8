"""Checks of settings, and hints for misspelt names."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


def near(word: str, legal: Iterable[str], hint: str = "did you mean {!r}? ") -> str:
    """Return a hint at the legal word that is closest to a wrong one, or an empty string if none is close."""
    known = list(legal)
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5) or [one for one in known if one.startswith(word)]
    return hint.format(found[0]) if found and word else ""


def check_number(name: str, value: float, low: float, high: float = math.inf, *, whole: bool = False) -> None:
    """Raise ValueError if a setting is not a (whole) number in its range."""
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not low <= value <= high or (not whole and not math.isfinite(value)):
        limits = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be a {'whole ' if whole else ''}number, {limits}, got {value!r}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError if a setting is none of its choices."""
    if value not in (choices := list(choices)):
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
