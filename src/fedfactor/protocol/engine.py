"""The interface of engines, which only move bytes to clients and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from fedfactor.protocol.message import Bytes, Parcel
from fedfactor.protocol.setup import Setup


@dataclass(frozen=True)
class Job:
    """A message for one client, and the client's state."""

    client: int
    parcel: Parcel
    """The message, not yet written: an engine may write it directly to where the client reads it."""
    state: Bytes | None

    @property
    def message(self) -> Bytes:
        """The bytes of the message."""
        return self.parcel.write()


@dataclass(frozen=True)
class Done:
    """The result of a job: the reply and the client's new state, or the reason of the failure."""

    client: int
    reply: Bytes | None
    state: Bytes | None = None
    failure: str = ""
    seconds: float = 0.0
    """How long the client worked."""
    late: bool = False
    """Whether this answers a job of an earlier round that had timed out; such a reply is dropped."""


class Engine(Protocol):
    """Runs jobs in any order; the server restores the order of the cohort."""

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Yield one result per job."""
        ...
