"""Buffered rounds on the virtual clock: who starts, who answers, and replies that wait for their time.

All times are known before a client trains (see `clock`), so the order of events follows from (seed, round, client). A
client is trained in the round in which it starts. If it answers in a later round, its reply waits in the store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fedfactor.protocol.buffering import Buffering
from fedfactor.protocol.coding import prefixed, sections
from fedfactor.protocol.message import Message, decode, encode
from fedfactor.protocol.method import Participant
from fedfactor.protocol.plan import Reply, Tensors
from fedfactor.protocol.settings import Rounds
from fedfactor.protocol.setup import Setup
from fedfactor.rng import numpy_rng, torch_rng
from fedfactor.server.clock import Clock, Outcome, Timeline, Timing
from fedfactor.server.dispatch import Dispatch, Exchange
from fedfactor.server.mode import Taking
from fedfactor.server.replies import Failure
from fedfactor.server.state import Server
from fedfactor.server.store import Store

SECTION = "pending"
"""The section of the store with replies that wait."""


@dataclass(frozen=True)
class Active:
    """A client that trains, and when it answers or fails."""

    timing: Timing
    second: float

    @property
    def who(self) -> Participant:
        """The client, with the round in which it started."""
        return self.timing.who


@dataclass(frozen=True)
class Window:
    """What happens before a step of the server."""

    round: int
    """The round that the step ends, counted from 0."""
    started: tuple[Active, ...]
    arrived: tuple[Participant, ...]
    """The clients whose replies fill the buffer, in the order of their arrival."""
    failed: tuple[Participant, ...]
    active: tuple[Active, ...]
    """The clients that still train when the server takes its step."""
    begin: float
    """When the server took its last step."""
    end: float
    """When the server takes its step."""

    @property
    def trained(self) -> list[Participant]:
        """The clients that start in this window and do not fail."""
        return [one.who for one in self.started if one.timing.fails_after == math.inf]

    def timeline(self, energy: bool) -> Timeline:
        """Return the clients that start in this window on the clock."""
        now = {who.client for who in self.arrived}
        timings = []
        for one in self.started:
            here: Outcome = "used" if one.who.client in now else "pending"
            timings.append(replace(one.timing, outcome=here if one.timing.fails_after == math.inf else "failed"))
        return Timeline(tuple(timings), self.end - self.begin, None, energy, waits=True)

    def event(self) -> dict[str, list[int]]:
        """Return the replies of the step as plain data: clients, and how many steps ago they started."""
        return {"clients": [who.client for who in self.arrived], "ages": [self.age(who) for who in self.arrived]}

    def age(self, who: Participant) -> int:
        """Return how many steps the server took while a client that arrives now trained."""
        return self.round - who.round


BEGIN = Window(-1, (), (), (), (), 0.0, 0.0)
"""Before the first round: nobody trains."""


class Buffer:
    """The clients of buffered rounds, one window after the other."""

    def __init__(
        self, buffering: Buffering, rounds: Rounds, clock: Clock, population: int, seed: int,
        participant: Callable[[int, int], Participant],
    ) -> None:  # fmt: skip
        self._room, self._size = buffering.sizes(rounds.cohort_size(population), population)
        self._rounds, self._clock, self._population = rounds, clock, population
        self._seed, self._participant = seed, participant
        self._last = BEGIN

    def window(self, round: int) -> Window:
        """Return what happens before the server's step in a round, counted from 0. A resumed run repeats all before."""
        if self._last.round > round:
            self._last = BEGIN
        while self._last.round < round:
            self._last = self._next(self._last)
        return self._last

    def _next(self, before: Window) -> Window:
        waiting, second, round = list(before.active), before.end, before.round + 1
        started, arrived, failed = list[Active](), list[Participant](), list[Participant]()
        active = {one.who.client for one in waiting}
        candidates = idle_clients(self._rounds, self._seed, round, self._population, active)
        while len(arrived) < self._size:
            for client in candidates if len(waiting) < self._room else ():
                timing = self._clock.timing(self._participant(client, round))
                started.append(Active(timing, second + timing.end))
                waiting.append(started[-1])
                if len(waiting) == self._room:
                    break
            if not waiting:  # the population is too small to replace clients that failed
                break
            # All that answer at the same time do so before others start. So with equal devices and a buffer for all of
            # them, rounds are the same as synchronous ones.
            second = min(one.second for one in waiting)
            for one in [one for one in waiting if one.second == second]:
                if len(arrived) < self._size:
                    waiting.remove(one)
                    (arrived if one.timing.fails_after == math.inf else failed).append(one.who)
        return Window(round, tuple(started), tuple(arrived), tuple(failed), tuple(waiting), before.end, second)


def idle_clients(rounds: Rounds, seed: int, round: int, population: int, active: set[int]) -> Iterator[int]:
    """Yield the clients that do not train: first the cohort that a synchronous round has, then all others."""
    cohort = rounds.cohort_of(seed, round, population)
    yield from (client for client in cohort if client not in active)
    others = numpy_rng(seed, "others", round).permutation(population)
    yield from (int(client) for client in others if client not in {*active, *cohort})


def put(store: Store, version: int, reply: Reply) -> None:
    """Let a reply wait in the store. What its change is measured against waits with it: the server's model moves on."""
    fields = {"capacity": reply.capacity, "samples": reply.samples, "figures": reply.figures, "norm": reply.norm}
    tensors = {**prefixed("model", reply.tensors), **prefixed("reference", reply.reference)}
    store.stage(
        version, SECTION, reply.client, encode(Message("pending", {**fields, "labels": [*reply.labels]}, tensors))
    )


def take(store: Store, version: int, setup: Setup, view: Tensors, who: Participant) -> Reply | Failure:
    """Return the reply of a client that started in an earlier round, and free its place in the store."""
    data = store.read(SECTION, who.client)
    if not data:
        return Failure(who.client, f"sent no valid reply when it trained in round {who.round + 1}")
    store.stage(version, SECTION, who.client, b"")
    message = decode(data)
    parts, fields = sections(message.tensors), message.fields
    rng = torch_rng(setup.training.seed, "plan", who.round, who.client)
    plan = setup.method.plan(view, who, setup.network(who.capacity), rng)
    return Reply(
        who.client, who.capacity, fields["samples"], plan, parts["reference"], parts["model"], {}, fields["figures"],
        tuple(fields["labels"]), fields["norm"],
    )  # fmt: skip


class Buffered:
    """Rounds that end with the reply that fills the buffer, on the virtual clock."""

    def __init__(
        self,
        buffer: Buffer,
        buffering: Buffering,
        setup: Setup,
        dispatch: Dispatch,
        work: Callable[[Participant], float],
        counts_energy: bool,
    ) -> None:
        """Take what follows the clock, and an estimate of a job's duration."""
        self._buffer, self._buffering, self._setup, self._dispatch = buffer, buffering, setup, dispatch
        self._work, self._counts_energy = work, counts_energy
        self._window, self._timeline = BEGIN, BEGIN.timeline(counts_energy)

    def begin(self, server: Server, store: Store) -> Taking:
        """Begin the round after a server state: clients train when they start, whenever they answer."""
        self._window = window = self._buffer.window(server.round)
        self._timeline = window.timeline(self._counts_energy)
        return Taking(window.trained, [one.who for one in window.started], len(window.arrived), self._timeline)

    def train(self, exchange: Exchange, add: Callable[[Reply], None]) -> None:
        """Add the replies that waited for this round, and train the clients that start in it.

        Old changes count less (FedBuff, Alg. 1).
        """
        window, store, missing = self._window, exchange.store, list[Failure]()
        setup, version, now = self._setup.at(window.round), window.round + 1, {who.client for who in window.arrived}
        for who in window.arrived:
            if who.round < window.round:
                found = take(store, version, setup, exchange.view, who)
                if isinstance(found, Failure):
                    missing.append(found)
                else:
                    add(found.scaled(self._buffering.weight(window.age(who))))

        def receive(reply: Reply) -> None:
            if reply.client in now:
                add(reply)
            else:
                put(store, version, reply)

        self._dispatch.train(exchange, window.trained, self._work, receive)
        exchange.answers.failures += missing + self._timeline.failures

    def event(self) -> dict[str, Any]:
        """Return the times of the round, and its replies."""
        return {"clock": self._timeline.event(), "buffered": self._window.event()}
