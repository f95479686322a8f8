"""Buffered rounds of clients on real machines: replies count in the order in which they arrive.

Nobody knows when a client will answer, so these rounds cannot be repeated to the bit. What a client trains on when the
server stops is forgotten: a resumed run starts new clients, from the last committed model and private states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from fedfactor.protocol.buffering import Buffering
from fedfactor.protocol.message import Bytes
from fedfactor.protocol.method import Participant
from fedfactor.protocol.plan import Reply
from fedfactor.protocol.settings import Rounds
from fedfactor.server.buffer import idle_clients
from fedfactor.server.dispatch import Dispatch, Exchange
from fedfactor.server.mode import Taking
from fedfactor.server.replies import Failure, Outcome, SentJobs
from fedfactor.server.state import Server
from fedfactor.server.store import Store


class Arrivals:
    """The clients that train now, and what happens before a step of the server."""

    def __init__(self, buffering: Buffering, rounds: Rounds, population: int, seed: int, dispatch: Dispatch) -> None:
        self._room, self._size = buffering.sizes(rounds.cohort_size(population), population)
        self._buffering, self._rounds, self._population, self._seed = buffering, rounds, population, seed
        self._dispatch, self._sent = dispatch, SentJobs()
        self._training: dict[int, tuple[Participant, float]] = {}
        self._started: list[Participant] = []
        self._arrived: list[tuple[int, int, float]] = []
        dispatch.tests_always = rounds.evaluate_clients != "none"

    def begin(self, server: Server, store: Store) -> Taking:
        """Begin a round. Its clients are in a list that `train` fills: nobody knows how many will start."""
        self._started, self._arrived = [], []
        return Taking(self._started, self._started, self._size, known=False)

    def _starting(self, round: int) -> Iterator[Participant]:
        """Yield the clients that can start in a round; each of them starts when it is asked for."""
        for client in idle_clients(self._rounds, self._seed, round, self._population, {*self._training}):
            self._started.append(who := self._dispatch.participant(client, round))
            self._training[client] = who, time.monotonic()
            yield who

    def train(self, exchange: Exchange, add: Callable[[Reply], None]) -> None:
        """Keep clients busy until the buffer is full, and call `add` with each valid reply. Old changes count less.

        The buffer stays partly empty only if all clients have answered or failed.
        """
        exchange.sent, before, t, answers = self._sent, self._sent.bytes, exchange.server.round, exchange.answers

        def use(client: int, outcome: Outcome, data: Bytes | None) -> None:
            self._sent.drop(client)
            who, since = self._training.pop(client)
            if isinstance(outcome, Failure):
                answers.failures.append(outcome)
                return
            reply, report = outcome
            add(reply.scaled(self._buffering.weight(t - who.round)))
            answers.reports.append(report)
            self._arrived.append((client, t - who.round, round(time.monotonic() - since, 3)))

        starting, training = self._starting(t), self._training
        for _ in self._dispatch.stream(exchange, starting, self._room, training, self._size, use):
            if len(self._arrived) == self._size:
                break
        answers.bytes_down = self._sent.bytes - before

    def event(self) -> dict[str, Any]:
        """Return the replies of the step as plain data, in the order of their arrival, and who still trains."""
        clients, ages, seconds = zip(*self._arrived, strict=True)
        step = {"clients": [*clients], "ages": [*ages], "seconds": [*seconds], "training": sorted(self._training)}
        return {"buffered": step}
