"""What every engine offers: it moves bytes to clients and back, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from fedfactor.protocol.message import Bytes, Parcel
from fedfactor.protocol.setup import Setup


@dataclass(frozen=True)
class Job:
    """A message for one client, and the state it builds on."""

    client: int
    parcel: Parcel
    """An engine may write it straight to where the client reads it."""
    state: Bytes | None

    @property
    def message(self) -> Bytes:
        """The message's bytes."""
        return self.parcel.write()


@dataclass(frozen=True)
class Done:
    """What came back: bytes and the client's new state, or the reason why nothing did."""

    client: int
    reply: Bytes | None
    state: Bytes | None = None
    failure: str = ""
    seconds: float = 0.0
    """How long the client worked."""
    late: bool = False
    """An answer to a job that was given up in an earlier round; it counts for nothing."""


class Engine(Protocol):
    """Runs jobs in any order; the federation folds the results in its own."""

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Yield one result a job."""
        ...
