"""How figures are measured and printed.

A figure is a ratio of medians taken in one run, the candidates timed in turn, so that a machine's mood
falls on all of them alike.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable


def emit(name: str, value: float, unit: str, target: str) -> None:
    """Write one figure as a JSON line to standard output."""
    line = {"name": name, "value": round(value, 4), "unit": unit, "target": target}
    print(json.dumps(line), flush=True)


def note(text: str) -> None:
    """Tell a waiting person what is going on, on standard error."""
    print(text, file=sys.stderr, flush=True)


def medians(candidates: dict[str, Callable[[], object]], repeats: int, warmup: int = 1) -> dict[str, float]:
    """Time every candidate `repeats` times in turn and return the median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warmup + repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}
