"""The counts that the five papers print, recomputed from the networks themselves and compared."""

from __future__ import annotations

from importlib import import_module

from fedfactor.tables.printed import MISPRINTS
from fedfactor.tables.row import CLOSE, VERDICTS, Printed, Row, Verdict, judge
from fedfactor.tables.view import count_verdicts, render

PAPERS = ("fedpara", "flanc", "fedhm", "prism", "feddecomp")

__all__ = [
    "CLOSE",
    "MISPRINTS",
    "PAPERS",
    "VERDICTS",
    "Printed",
    "Row",
    "Verdict",
    "compute",
    "count_verdicts",
    "judge",
    "render",
]


def compute(paper: str | None = None) -> list[Row]:
    """Recompute the figures of one paper, or of all papers.

    Takes a few seconds, since the networks have no weights. Raises ValueError if there are no tables of this paper.
    """
    if paper is not None and paper not in PAPERS:
        raise ValueError(f"there are no tables of {paper!r}; choose one of {', '.join(PAPERS)}")
    found: list[Row] = []
    for name in PAPERS if paper is None else (paper,):
        # Imported on demand: the tables of one paper need only its own networks.
        found += import_module(f"fedfactor.tables.{name}").rows()
    return found
