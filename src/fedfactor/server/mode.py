"""What the three ways to choose clients, and to wait for them, have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fedfactor.protocol.method import Participant
from fedfactor.protocol.plan import Reply
from fedfactor.server.clock import Timeline
from fedfactor.server.dispatch import Exchange
from fedfactor.server.state import Server
from fedfactor.server.store import Store


@dataclass(frozen=True)
class Taking:
    """Who takes part in a round."""

    training: list[Participant]
    asked: list[Participant]
    """All that were asked: on a fleet, some of them fail or are too late, and do not train."""
    wanted: int
    """How many replies the server waits for."""
    timeline: Timeline | None = None
    known: bool = True
    """Whether the clients are known when the round begins."""


class Mode(Protocol):
    """How a round chooses its clients, and which replies it waits for."""

    def begin(self, server: Server, store: Store) -> Taking:
        """Begin the round after a server state."""

    def train(self, exchange: Exchange, add: Callable[[Reply], None]) -> None:
        """Train the clients of the round, and call `add` with each valid reply that counts in it."""

    def event(self) -> dict[str, Any]:
        """Return what the round's event says about times and replies."""
