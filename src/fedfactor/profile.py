"""Profiling: named time spans of this process and of its workers, recorded only inside `recording()`.

```python
with recording() as recorder:
    ...
print(recorder.rows())
recorder.write("trace.json")  # opens in Perfetto and in Chrome
```

A span's own time excludes the spans inside it. The own times of all spans and "the rest" add up to the wall time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, ParamSpec, TypeVar

from fedfactor.support.files import write_text

Name = Literal["training", "composing", "encoding", "server algebra", "evaluating", "committing", "waiting", "the rest"]
NAMES: tuple[Name, ...] = (
    "training", "composing", "encoding", "server algebra", "evaluating", "committing", "waiting", "the rest",
)  # fmt: skip
MOST_SPANS = 200_000
"""Most spans per process in the trace. The table counts all of them."""

Span = tuple[Name, float, float]
"""Name, start and length in seconds. All processes of a machine read the same clock."""
P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Track:
    """The spans of one process."""

    spans: list[Span] = field(default_factory=list)
    seconds: dict[Name, float] = field(default_factory=dict)
    """Own time per name."""
    dropped: int = 0

    def add(self, other: Track) -> None:
        """Append spans that were recorded later."""
        self.dropped += other.dropped + max(0, len(self.spans) + len(other.spans) - MOST_SPANS)
        self.spans += other.spans[: MOST_SPANS - len(self.spans)]
        for name, seconds in other.seconds.items():
            self.count(name, seconds)

    def count(self, name: Name, seconds: float) -> None:
        """Add to the own time of a name."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class Recorder:
    """Collects the spans of this process, and those that workers send."""

    def __init__(self) -> None:
        self.start, self.wall = perf_counter(), 0.0
        self.mine = Track()
        self.workers: dict[int, Track] = {}
        self._inner: list[float] = []
        """For each open span, the time of the spans inside it."""

    @contextmanager
    def span(self, name: Name) -> Iterator[None]:
        """Record a block as a span."""
        start = perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            seconds = perf_counter() - start
            self.mine.count(name, seconds - self._inner.pop())
            if self._inner:
                self._inner[-1] += seconds
            if len(self.mine.spans) < MOST_SPANS:
                self.mine.spans.append((name, start, seconds))
            else:
                self.mine.dropped += 1

    def absorb(self, worker: int, track: Track) -> None:
        """Add the spans of a worker."""
        self.workers.setdefault(worker, Track()).add(track)

    def rows(self) -> dict[Name, tuple[float, float | None]]:
        """Return seconds by name: of this process, and the mean over workers. Each column adds up to the wall time."""
        mine = self._filled(self.mine.seconds, "the rest")
        if not self.workers:
            return {name: (mine[name], None) for name in NAMES}
        tracks = self.workers.values()
        mean = {name: sum(track.seconds.get(name, 0.0) for track in tracks) / len(tracks) for name in NAMES}
        theirs = self._filled(mean, "waiting")
        return {name: (mine[name], theirs[name]) for name in NAMES}

    def _filled(self, seconds: dict[Name, float], left: Name) -> dict[Name, float]:
        """Assign the rest of the wall time to the name `left`."""
        found = {name: seconds.get(name, 0.0) for name in NAMES if name != left}
        return {**found, left: self.wall - sum(found.values())}

    def write(self, path: Path | str) -> None:
        """Write all spans in Chrome's trace event format, one track per process."""
        tracks = {0: self.mine, **{1 + worker: track for worker, track in sorted(self.workers.items())}}
        events: list[dict[str, Any]] = []
        for number, track in tracks.items():
            name = f"worker {number}" if number else "server"
            events.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}})
            for what, start, seconds in track.spans:
                place = {"pid": 0, "tid": number, "ts": 1e6 * (start - self.start), "dur": 1e6 * seconds}
                events.append({"ph": "X", "name": what, "cat": "fedfactor", **place})
        dropped = sum(track.dropped for track in tracks.values())
        write_text(Path(path), json.dumps({"traceEvents": events, "otherData": {"spans left out": dropped}}))


_recorder: Recorder | None = None
_NOTHING = nullcontext()


def span(name: Name) -> AbstractContextManager[None]:
    """Record a block as a span, inside `recording()`; otherwise do nothing."""
    return _NOTHING if _recorder is None else _recorder.span(name)


def timed(name: Name) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that records each call of a function as a span, inside `recording()`."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def inner(*args: P.args, **kwargs: P.kwargs) -> R:
            if _recorder is None:
                return function(*args, **kwargs)
            with span(name):
                return function(*args, **kwargs)

        return inner

    return wrap


def current() -> Recorder | None:
    """Return the recorder of this process, or `None`."""
    return _recorder


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record the spans of a block."""
    global _recorder
    before, _recorder = _recorder, Recorder()
    try:
        yield _recorder
    finally:
        _recorder.wall = perf_counter() - _recorder.start
        _recorder = before
