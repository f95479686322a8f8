"""The interface of engines, which bring messages to clients and return their replies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fedfactor.protocol.message import Bytes, joined
from fedfactor.protocol.setup import Setup


@dataclass(frozen=True)
class Job:
    """An encoded message to one client, and the private state that the client starts from."""

    client: int
    parts: Sequence[Bytes]
    """The message. Its parts are views of the server's tensors, so an engine can send it without a copy in memory."""
    state: Bytes | None
    longest: int | None = None
    """Bytes of the longest valid reply; `None` if it is not known."""

    @property
    def message(self) -> bytearray:
        """A copy of the message."""
        return joined(self.parts)


@dataclass(frozen=True)
class Done:
    """Result of a job: the encoded reply and the client's new state, or the reason of the failure."""

    client: int
    reply: Bytes | None
    state: Bytes | None = None
    failure: str = ""
    seconds: float = 0.0
    """How long the client worked, in seconds."""
    late: bool = False
    """Whether this is the answer to a job of an earlier round, which arrived too late to be used."""
    fault: bool = False
    """Whether the failure is an answer that no honest client sends."""


class Engine(Protocol):
    """Runs jobs in any order; the federation aggregates the results in the order of the cohort.

    An engine whose attribute `shares_memory` is true has workers on this machine with all data: they also measure the
    server's model. An engine with a method `most_samples(client)` knows how many examples a client has at most.
    """

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Yield one result per job."""
        ...


@runtime_checkable
class StreamingEngine(Engine, Protocol):
    """An engine whose clients work on their own: their jobs may go on after a round."""

    def stream(self, setup: Setup, jobs: Iterable[Job], room: int) -> Iterator[Done]:
        """Keep `room` jobs under way, and yield results as they arrive, also of jobs of earlier calls.

        The caller stops when it has enough results. Jobs that are under way then stay so. It ends by itself if nothing
        is under way, and there are no more jobs.
        """
        ...
