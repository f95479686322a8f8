"""The replies of clients: what is kept of them, what they are validated against, and the order in which they count."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfactor.protocol.message import Bytes
from fedfactor.protocol.plan import Reply, Tensors
from fedfactor.protocol.validation import SentJob
from fedfactor.server.spool import Spool

LONGEST_REASON = 300


@dataclass(frozen=True)
class Failure:
    """A client whose update was not used, and why."""

    client: int
    reason: str
    fault: bool = False
    """Whether the client sent a reply that no honest client sends."""

    def __post_init__(self) -> None:
        # Parts of a reason may come from the client.
        object.__setattr__(self, "reason", self.reason[:LONGEST_REASON])

    def event(self) -> dict[str, Any]:
        """Return the failure as plain data."""
        return {"client": self.client, "reason": self.reason} | ({"fault": True} if self.fault else {})


@dataclass
class Answers:
    """What is kept of the replies to a round's training jobs; their tensors are not."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    """The fields of each valid reply, in the order of the jobs."""
    failures: list[Failure] = field(default_factory=list)
    bytes_down: int = 0
    bytes_up: int = 0
    busy: float = 0.0
    """Seconds that the slowest client worked."""
    late: int = 0
    """Number of replies to jobs of earlier rounds, which are dropped."""


Outcome = tuple[Reply, dict[str, Any]] | Failure
"""A valid reply with the fields of its message, or why there is none."""
KEPT_BYTES = 256 << 20
"""Bytes of memory for what jobs are validated against, and again for replies that wait for their turn."""


class SentJobs:
    """What the replies of a round are validated against. What does not fit in memory is computed again when needed.

    Many downloads are views of the server's tensors: these are counted, although they need no memory of their own.
    """

    def __init__(self) -> None:
        self.bytes = 0
        """The length of all messages so far."""
        self._room = KEPT_BYTES
        self._kept: dict[int, tuple[SentJob, int]] = {}
        self._again: dict[int, Callable[[], tuple[SentJob, Tensors]]] = {}

    def put(self, job: SentJob, length: int, again: Callable[[], tuple[SentJob, Tensors]]) -> None:
        """Add a job whose message has this length; `again` prepares it once more."""
        self.bytes += length
        self._again[job.who.client] = again
        size = _bytes(job.reference, job.extras)
        if size <= self._room:
            self._kept[job.who.client] = job, size
            self._room -= size

    def __contains__(self, client: int) -> bool:
        return client in self._again

    def get(self, client: int) -> SentJob:
        """Return the job of a client."""
        return self._kept[client][0] if client in self._kept else self._again[client]()[0]

    def drop(self, client: int) -> None:
        """Forget the job of a client."""
        del self._again[client]
        if client in self._kept:
            self._room += self._kept.pop(client)[1]


class Turns:
    """Brings outcomes into the order of the jobs. Replies that come early wait, in memory or beyond a limit on disk."""

    def __init__(self, order: Iterable[int], directory: Path | None, again: Callable[[int, Bytes], Outcome]) -> None:
        """Take the clients in order. `again` decodes a reply that was on disk."""
        self._order, self._again = deque(order), again
        self._waiting: dict[int, tuple[Outcome | None, int]] = {}
        self._room = KEPT_BYTES
        self._spool = Spool(directory)

    def put(self, client: int, outcome: Outcome, data: Bytes) -> None:
        """Add an outcome, with the bytes of the reply."""
        size = 0 if client == self._order[0] else _size(outcome)
        if size <= self._room:
            self._waiting[client] = outcome, size
            self._room -= size
        else:
            self._waiting[client] = None, 0
            self._spool.put(client, data)

    def due(self) -> Iterator[Outcome]:
        """Yield the outcomes whose turn it is now, and keep none of them."""
        while self._order and self._order[0] in self._waiting:
            first = self._order.popleft()
            self._room += self._waiting[first][1]
            yield self._waiting.pop(first)[0] or self._again(first, self._spool.take(first))


def _size(outcome: Outcome) -> int:
    """Return the bytes of memory of a valid reply."""
    return _bytes(outcome[0].tensors, outcome[0].extras) if isinstance(outcome, tuple) else 0


def _bytes(*groups: Tensors) -> int:
    return sum(tensor.nbytes for tensors in groups for tensor in tensors.values())


class Diverged(RuntimeError):
    """Training diverged: a round's result is not finite, or too many clients'. The last committed round is intact."""


class QuorumLost(RuntimeError):
    """Too few clients of a cohort sent a valid reply; the last committed round is intact."""


class NoValidReply(RuntimeError):
    """No client sent a valid reply to an evaluation, calibration or storing job."""
