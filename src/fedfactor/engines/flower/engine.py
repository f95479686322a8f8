"""Clients on Flower's nodes: jobs are pushed to them, answers pulled until all are there or the time is up.

What clients keep stays with them: a job names the state it builds on by its SHA-256, the answer names the new one,
and the server commits the receipt (`states.py`). Whatever comes back is checked here for who sent it and to what, and
by the federation for what is in it. An answer that comes after its round was closed is dropped and counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fedfactor.engines.flower.adapter import Answer, Grid, Inbox, instruction, pack, push, unpack
from fedfactor.engines.flower.roster import Roster
from fedfactor.protocol.engine import Done, Job
from fedfactor.protocol.message import BadMessage
from fedfactor.protocol.setup import Setup
from fedfactor.protocol.states import SHA256, receipt, receipt_sha256

SHORTEST_PAUSE = 0.01


class Unsent(RuntimeError):
    """A job that could not be sent, and why."""


@dataclass(frozen=True)
class Sent:
    """A job on its way."""

    client: int
    node: int
    at: float


@dataclass
class Flower:
    """Runs jobs on the nodes of a grid."""

    grid: Grid
    roster: Roster
    deadline: float = 3600.0
    """Seconds that the clients of a round have to answer, from when the last of them was asked."""
    quorum: float = 0.5
    """Share of the clients that must be connected before a round is begun."""
    wait: float = 600.0
    """Seconds to wait for them."""
    poll: float = 0.5
    """Longest pause between two pulls."""
    restart_lost: bool = False
    """A client whose state is gone starts anew; otherwise its jobs fail."""
    _late: dict[str, Sent] = field(default_factory=dict)
    _inbox: Inbox = field(default_factory=Inbox)

    def __post_init__(self) -> None:
        for name in ("deadline", "wait", "poll"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "wait"):
                raise ValueError(f"{name} is a positive number of seconds, got {value!r}")

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Yield one result a job, as they come; and one for every answer to a job that was given up before."""
        self.roster.gather(self.grid, math.ceil(self.quorum * self.roster.population), self.wait)
        waiting: dict[str, Sent] = {}
        for job in jobs:
            try:
                number, sent = self._send(job)
            except Unsent as error:
                yield Done(job.client, None, failure=str(error))
            else:
                waiting[number] = sent
        end, pause = time.monotonic() + self.deadline, SHORTEST_PAUSE
        while waiting:
            looked = time.monotonic()
            answers = self._inbox.pull(self.grid, [*waiting, *self._late])
            for answer in answers:
                if answer.to in waiting:
                    yield self._done(waiting.pop(answer.to), answer)
                elif answer.to in self._late:
                    sent = self._late.pop(answer.to)
                    if answer.content is not None:
                        yield Done(sent.client, None, late=True)
            if waiting and time.monotonic() >= end:
                break
            pause = SHORTEST_PAUSE if answers else min(2 * pause, self.poll)
            if waiting:
                # Of many, as long as the look at them took: the SuperLink has others to serve.
                now = time.monotonic()
                time.sleep(min(max(pause, now - looked), max(0.0, end - now)))
        self._late.update(waiting)
        now = time.monotonic()
        self._late = {number: sent for number, sent in self._late.items() if now - sent.at < self._life}
        for sent in waiting.values():
            yield Done(sent.client, None, failure=f"did not answer within {self.deadline:g} seconds")

    @property
    def _life(self) -> float:
        """Seconds that Flower keeps a message: longer than a round, so that a late answer can still be counted."""
        return 2 * self.deadline + 60.0

    def _send(self, job: Job) -> tuple[str, Sent]:
        node = self.roster.here.get(job.client)
        if node is None:
            raise Unsent("is not connected")
        base = "" if job.state is None else receipt_sha256(job.state)
        if base is None:
            raise ValueError(
                f"the server holds the private state of client {job.client} itself: this run was started on one "
                "machine and must be carried on there, since states do not travel"
            )
        fields: dict[str, str | bool] = {"run": self.roster.run, "state": base, "restart": self.restart_lost}
        message = instruction(pack(job.message, fields), node, "train", self._life)
        number = push(self.grid, message)
        if number is None:
            raise Unsent("the SuperLink did not take the message")
        return number, Sent(job.client, node, time.monotonic())

    def _done(self, sent: Sent, answer: Answer) -> Done:
        """Read an answer; whatever is wrong with it costs this client's update only."""
        if answer.content is None:
            return Done(sent.client, None, failure=answer.error)
        try:
            if answer.node != sent.node:
                raise BadMessage(f"node {answer.node} answered in place of {sent.node}")
            data, fields = unpack(answer.content)
            if "failure" in fields or data is None:
                if fields.get("stranger") is True:
                    self.roster.forget(sent.node)
                raise BadMessage(str(fields.get("failure", "the answer is empty")))
            state, seconds = fields.get("state"), fields.get("seconds")
            if not isinstance(state, str) or not (state == "" or SHA256.fullmatch(state)):
                raise BadMessage("the answer does not name the client's new state by its SHA-256")
        except BadMessage as error:
            return Done(sent.client, None, failure=str(error))
        # A client's own word for how long it worked, as far as it can be true.
        worked = seconds if isinstance(seconds, float) and math.isfinite(seconds) else 0.0
        worked = min(max(worked, 0.0), time.monotonic() - sent.at)
        return Done(sent.client, data, receipt(state) if state else None, seconds=worked)
