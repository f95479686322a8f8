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


def check_number(
    name: str, value: float, low: float, high: float = math.inf, *, whole: bool = False, above: bool = False
) -> None:
    """Raise ValueError if a setting is not a (whole) number in its range; with `above`, `low` is not in it."""
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not low <= value <= high or (above and value == low) or (not whole and not math.isfinite(value)):
        limits = f"in {'(' if above else '['}{low:g}, {high:g}]"
        if high == math.inf:
            limits = f"above {low:g}" if above else f"at least {low:g}"
        raise ValueError(f"{name} must be a {'whole ' if whole else ''}number, {limits}, got {value!r}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError if a setting is none of its choices."""
    if value not in (choices := list(choices)):
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
