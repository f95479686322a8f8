"""Rounds that wait for their cohort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedfactor.protocol.method import Participant
from fedfactor.protocol.plan import Reply
from fedfactor.server.clock import Clock
from fedfactor.server.dispatch import Dispatch, Exchange
from fedfactor.server.mode import Taking
from fedfactor.server.replies import QuorumLost
from fedfactor.server.state import Server
from fedfactor.server.store import Store


class Synchronous:
    """Rounds that wait for their cohort, on a fleet up to its deadline."""

    def __init__(
        self,
        dispatch: Dispatch,
        clock: Clock | None,
        work: Callable[[Participant], float],
        drawn: Callable[[int], list[int]],
        left_out: Callable[[], list[int]],
    ) -> None:
        """Take an estimate of a job's duration, the cohort of each round, and the clients that are not asked."""
        self._dispatch, self._clock, self._work = dispatch, clock, work
        self._drawn, self._left_out = drawn, left_out
        self._taking = Taking([], [], 0)

    def begin(self, server: Server, store: Store) -> Taking:
        """Begin the round after a server state. Raise QuorumLost if all its clients are left out."""
        self._taking = self._taken(server, store)
        return self._taking

    def _taken(self, server: Server, store: Store) -> Taking:
        round, out = server.round, {*self._left_out()}
        drawn = self._drawn(round)
        clients = [client for client in drawn if client not in out]
        if drawn and not clients:
            raise QuorumLost(f"round {round + 1}: all its clients are left out: they sent invalid replies before")
        wanted = len(clients)
        clients = self._clock.asked(clients, round) if self._clock else clients
        asked = [self._dispatch.participant(client, round) for client in clients if client not in out]
        if not self._clock or not asked:
            return Taking(asked, asked, wanted)
        missed = self._dispatch.missed_moves(server, store)
        further = lambda client: sum(one.nbytes for one in missed(client).values())  # noqa: E731
        timeline = self._clock.round(asked, wanted, further)
        return Taking(timeline.of("used"), timeline.of("used", "late", "failed"), wanted, timeline)

    def train(self, exchange: Exchange, add: Callable[[Reply], None]) -> None:
        """Train those of the cohort that answer in time."""
        self._dispatch.train(exchange, self._taking.training, self._work, add)
        if timeline := self._taking.timeline:
            exchange.answers.failures += timeline.failures

    def event(self) -> dict[str, Any]:
        """Return the times of the round on its fleet."""
        return {"clock": self._taking.timeline.event()} if self._taking.timeline else {}
