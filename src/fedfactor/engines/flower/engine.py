"""Clients on Flower's nodes: the engine sends jobs and collects answers until all have arrived or the deadline passes.

Private state stays on the client's device: a job names the state to start from by its SHA-256, the answer names the new
state, and the server commits that receipt (`protocol/states.py`). The engine checks who sent an answer and to which
job; the federation checks its content. Answers that arrive after their deadline are dropped and counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from fedfactor.engines.flower.adapter import Grid, Inbox, NodeAnswer, instruction, pack, push, unpack
from fedfactor.engines.flower.roster import Roster
from fedfactor.protocol.engine import Done, Job
from fedfactor.protocol.message import BadMessage
from fedfactor.protocol.setup import Setup
from fedfactor.protocol.states import SHA256, receipt, receipt_sha256

SHORTEST_PAUSE = 0.01
MOST_UNANSWERED = 3
"""Jobs of a node that may be unanswered when it gets another one; the SuperLink keeps each until it expires."""


class Unsent(RuntimeError):
    """A job could not be sent; the message says why."""


@dataclass(frozen=True)
class Sent:
    """A job that was sent and not answered yet."""

    client: int
    node: int
    at: float
    longest: int
    """Bytes of the longest valid answer."""


@dataclass
class FlowerEngine:
    """Engine that runs jobs on the nodes of a Flower grid."""

    grid: Grid
    roster: Roster
    deadline: float = 3600.0
    """Seconds that clients have to answer, from when the round's last job was sent; in `stream`, from their own."""
    quorum: float = 0.5
    """Share of the clients that must be connected before a round starts."""
    wait: float = 600.0
    """Seconds to wait for the quorum."""
    poll: float = 0.5
    """Longest pause between two pulls, in seconds."""
    restart_lost: bool = False
    """Whether a client that has lost its state starts from the initial state; otherwise its jobs fail."""
    _under_way: dict[str, Sent] = field(default_factory=dict)
    """Jobs of `stream`, which go on between its calls."""
    _late: dict[str, Sent] = field(default_factory=dict)
    _inbox: Inbox = field(default_factory=Inbox)

    def __post_init__(self) -> None:
        for name in ("deadline", "wait", "poll"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "wait"):
                raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Yield one result per job as answers arrive, and one `late` result per answer to a job of an earlier round."""
        return self._collect(jobs, {}, math.inf)

    def stream(self, setup: Setup, jobs: Iterable[Job], room: int) -> Iterator[Done]:
        """Keep `room` jobs under way, and yield results as answers arrive: see `StreamingEngine`."""
        return self._collect(jobs, self._under_way, room)

    def _collect(self, jobs: Iterable[Job], waiting: dict[str, Sent], room: float) -> Iterator[Done]:
        """Send jobs while there is room, and yield results, until there is neither a job nor anybody to wait for."""
        self.roster.gather(self.grid, math.ceil(self.quorum * self.roster.population), self.wait)
        now = time.monotonic()
        self._late = {number: sent for number, sent in self._late.items() if now - sent.at < self._life}
        jobs, pause, last = iter(jobs), SHORTEST_PAUSE, now
        while True:
            begun, job = time.monotonic(), None
            while len(waiting) < room and (job := next(jobs, None)):
                try:
                    number, sent = self._send(job)
                except Unsent as error:
                    yield Done(job.client, None, failure=str(error))
                else:
                    waiting[number], last = sent, sent.at
                if time.monotonic() - begun >= self.poll:  # sending to many clients takes long, and answers pile up
                    break
            if not (job or waiting):
                return
            # The jobs of a round have one deadline, from when all of them were sent.
            since = None if room < math.inf else math.inf if job else last
            looked, count = time.monotonic(), len(waiting) + len(self._late)
            yield from self._answers(waiting, since)
            if job or not waiting:
                continue
            pause = SHORTEST_PAUSE if len(waiting) + len(self._late) < count else min(2 * pause, self.poll)
            # With many clients, pause at least as long as the pulls took: the SuperLink also serves the nodes.
            now, end = time.monotonic(), min(self._end(sent, since) for sent in waiting.values())
            time.sleep(min(max(pause, now - looked), max(0.0, end - now)))

    def most_samples(self, client: int) -> int | None:
        """Return the number of examples that a client enrolled with; `None` if it is not known."""
        return self.roster.samples_of(client)

    def _answers(self, waiting: dict[str, Sent], since: float | None) -> Iterator[Done]:
        """Yield the results that have arrived, and failures of jobs whose time is over: see `_end`.

        An answer is pulled when the one before it has been used. Late ones come first, then those of the oldest jobs:
        the caller of `stream` may stop at any result.
        """
        for number, sent in [*self._late.items(), *waiting.items()]:
            # No variable holds an answer while it is used.
            pulled = self._inbox.pull(self.grid, [number], sent.longest)
            yield from filter(None, map(partial(self._result, waiting), pulled))
            if number in waiting and time.monotonic() >= self._end(waiting[number], since):
                self._late[number] = waiting.pop(number)
                yield Done(sent.client, None, failure=f"did not answer within {self.deadline:g} seconds")

    def _result(self, waiting: dict[str, Sent], answer: NodeAnswer) -> Done | None:
        """Return the result in an answer; `None` if nobody waits for it."""
        if answer.to in waiting:
            return self._done(waiting.pop(answer.to), answer)
        sent = self._late.pop(answer.to, None)
        return None if sent is None or answer.content is None else Done(sent.client, None, late=True)

    def _end(self, sent: Sent, since: float | None) -> float:
        """Return when the time of a job is over, counted from `since`; if this is `None`, from when it was sent."""
        return self.deadline + (sent.at if since is None else since)

    @property
    def _life(self) -> float:
        """Seconds that Flower keeps a message; longer than a round, so that late answers can be counted."""
        return 2 * self.deadline + 60.0

    def _send(self, job: Job) -> tuple[str, Sent]:
        node = self.roster.here.get(job.client)
        if node is None:
            raise Unsent("is not connected")
        silent = sum(sent.node == node for sent in self._late.values())
        if silent >= MOST_UNANSWERED:
            raise Unsent(f"has not answered its last {silent} jobs, and gets no other one until it has")
        base = "" if job.state is None else receipt_sha256(job.state)
        if base is None:
            raise ValueError(
                f"the server holds the private state of client {job.client}: this run was started on one machine and "
                "must be resumed there, because private states are not sent to other machines"
            )
        fields: dict[str, str | bool] = {"run": self.roster.run, "state": base, "restart": self.restart_lost}
        message = instruction(pack(job.parts, fields), node, "train", self._life, job.longest)
        number = push(self.grid, message)
        if number is None:
            raise Unsent("the SuperLink did not accept the message")
        return number, Sent(job.client, node, time.monotonic(), job.longest or 0)

    def _done(self, sent: Sent, answer: NodeAnswer) -> Done:
        """Return the result in an answer; a faulty answer becomes a failure of this client only."""
        if answer.content is None:
            return Done(sent.client, None, failure=answer.error, fault=answer.fault)
        try:
            if answer.node != sent.node:
                raise BadMessage(f"node {answer.node} answered instead of node {sent.node}")
            data, fields = unpack(answer.content)
            if "failure" in fields or data is None:
                if fields.get("stranger") is True:
                    self.roster.forget(sent.node)
                return Done(sent.client, None, failure=str(fields.get("failure", "the answer is empty")))
            state, seconds = fields.get("state"), fields.get("seconds")
            if not isinstance(state, str) or not (state == "" or SHA256.fullmatch(state)):
                raise BadMessage("the answer does not name the client's new state by its SHA-256")
        except BadMessage as error:
            return Done(sent.client, None, failure=str(error), fault=True)
        # As reported by the client, limited to the time since the job was sent.
        worked = seconds if isinstance(seconds, float) and math.isfinite(seconds) else 0.0
        worked = min(max(worked, 0.0), time.monotonic() - sent.at)
        return Done(sent.client, data, receipt(state) if state else None, seconds=worked)
