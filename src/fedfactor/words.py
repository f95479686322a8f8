"""Words for messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(word: str, legal: Iterable[str], hint: str = "did you mean {!r}? ") -> str:
    """Return a hint at the legal word that is most like a wrong one; nothing if none is."""
    known = list(legal)
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.5) or [one for one in known if one.startswith(word)]
    return hint.format(found[0]) if found and word else ""
