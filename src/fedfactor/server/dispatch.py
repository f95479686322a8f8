"""Sends jobs to clients through the engine, and collects their replies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedfactor.profile import span
from fedfactor.protocol.coding import code_down, decode_down, prefixed
from fedfactor.protocol.engine import Done, Engine, Job
from fedfactor.protocol.message import BadMessage, Bytes, Message, NotFinite, decode, encode
from fedfactor.protocol.method import Participant
from fedfactor.protocol.places import Places
from fedfactor.protocol.plan import Reply, Tensors, pull
from fedfactor.protocol.settings import Capacities, Rounds
from fedfactor.protocol.setup import Setup
from fedfactor.protocol.states import HeldTensors, States
from fedfactor.protocol.validation import SentJob, check_report, check_statistics, check_upload
from fedfactor.rng import torch_rng
from fedfactor.server.state import Server

LONGEST_REASON = 300


@dataclass(frozen=True)
class Failure:
    """A client whose update was not used, and why."""

    client: int
    reason: str

    def __post_init__(self) -> None:
        # Parts of a reason may come from the client.
        object.__setattr__(self, "reason", self.reason[:LONGEST_REASON])


@dataclass
class Answers:
    """The replies of a round's clients to training jobs."""

    replies: list[Reply] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    """The fields of each reply, in the same order."""
    failures: list[Failure] = field(default_factory=list)
    states: dict[int, Bytes] = field(default_factory=dict)
    """New states of the clients whose replies were accepted."""
    bytes_down: int = 0
    bytes_up: int = 0
    busy: float = 0.0
    """Seconds that the slowest client worked."""
    late: int = 0
    """Number of replies to jobs of earlier rounds, which are dropped."""


@dataclass
class Gathered:
    """The replies of clients to evaluation, calibration or storing jobs."""

    messages: dict[int, Message] = field(default_factory=dict)
    """Valid replies by client, in ascending order."""
    moved: int = 0
    """Bytes in both directions."""
    bad: int = 0
    """Number of invalid replies."""


class Diverged(RuntimeError):
    """Training diverged: a round's result is not finite, or too many clients'. The last committed round is intact."""


class NoValidReply(RuntimeError):
    """No client sent a valid reply to an evaluation, calibration or storing job."""


class Dispatch:
    """The server's access to the clients of a run."""

    def __init__(self, setup: Setup, rounds: Rounds, capacities: Capacities, engine: Engine) -> None:
        self._setup, self._rounds, self._capacities, self._engine = setup, rounds, capacities, engine
        self._levels = capacities.assign(setup.training.seed, setup.task.data.clients)
        self._drawn = -1, 0  # a round, and its draw of capacities
        keep = setup.optimizer.keeps_state or setup.codec.keeps_state
        traits = setup.method.traits
        self._places_change = keep and traits.adapts and (traits.moves or capacities.dynamic)
        """Whether clients keep tensors whose sizes or places change between rounds."""

    def participant(self, client: int, round: int) -> Participant:
        """Return a client with the capacity it has in a round."""
        if self._capacities.dynamic:
            level = self._capacities.redraw(self._setup.training.seed, round, client, self._attempt(round))
        else:
            level = self._capacities.levels[self._levels[client]]
        return Participant(client, level, round)

    def _attempt(self, round: int) -> int:
        """Return which draw of capacities a round uses; see `Capacities.cover`."""
        if self._drawn[0] != round:
            seed = self._setup.training.seed
            cohort = self._rounds.cohort_of(seed, round, self._setup.task.data.clients)
            self._drawn = round, self._capacities.covering_attempt(seed, round, cohort)
        return self._drawn[1]

    def jobs(
        self,
        kind: str,
        server: Server,
        view: Tensors,
        clients: Iterable[Participant],
        store: States,
        sent: dict[int, SentJob] | None = None,
    ) -> Iterator[Job]:
        """Yield each client's job when the engine asks for it; record in `sent` what its reply is validated against."""
        setup, training, round = self._setup.at(server.round), self._setup.training, server.round
        held = HeldTensors(store, "server")
        broadcast = setup.optimizer.broadcast(server.optimizer) if kind == "train" else {}
        for who in clients:
            network, trained = setup.network(who.capacity), setup.trained(who.capacity)
            rng = torch_rng(training.seed, "plan", round, who.client) if kind == "train" else None
            with span("server algebra"):
                plan = setup.method.plan(view, who, network, rng)
                down = setup.method.download(view, who, plan, held, network)
            coded = code_down(setup.codec, trained, down)
            extras = pull(broadcast, {name: piece for name, piece in plan.items() if piece.source in broadcast})
            fields: dict[str, Any] = {"client": who.client, "round": round, "capacity": who.capacity}
            fields["lr"] = training.rate(round, self._rounds.rounds)
            fields["test"] = kind == "train" and self._rounds.due(round + 1)
            if kind == "train" and self._places_change:
                fields["places"] = Places({name: plan[name] for name in sorted(trained & plan.keys())}).written()
            message = encode(Message(kind, fields, prefixed("model", coded) | prefixed("extra", extras)))
            if sent is not None:
                reference = decode_down(setup.codec, trained, coded)
                sent[who.client] = SentJob(who, plan, reference, extras, len(message))
            yield Job(who.client, message, store.read("client", who.client))

    def train(
        self,
        server: Server,
        view: Tensors,
        cohort: Sequence[Participant],
        store: States,
        work: Callable[[Participant], float],
        on_event: Callable[[dict[str, Any]], None],
    ) -> Answers:
        """Train the cohort. Replies are returned in the order of the cohort, not in the order of their arrival.

        `work` estimates the duration of a client's job. The longest jobs start first, so that none of them starts last.
        """
        sent: dict[int, SentJob] = {}
        outcomes: dict[int, tuple[Reply, dict[str, Any]] | Failure] = {}
        answers, t = Answers(), server.round
        jobs = self.jobs("train", server, view, sorted(cohort, key=lambda who: -work(who)), store, sent)
        for done in self._engine.run(self._setup, jobs):
            if done.late:
                answers.late += 1
                continue
            if done.client not in sent or done.client in outcomes:
                answers.failures.append(Failure(done.client, "was not asked in this round, or answered twice"))
                continue
            answers.bytes_up += len(done.reply or b"")
            answers.busy = max(answers.busy, done.seconds)
            outcome = outcomes[done.client] = self._accept(done, sent[done.client], t)
            if not isinstance(outcome, Failure) and done.state is not None:
                answers.states[done.client] = done.state
            failed = outcome.reason if isinstance(outcome, Failure) else None
            on_event({"event": "answered", "round": t + 1, "client": done.client, "failure": failed, "of": len(cohort)})
        answers.bytes_down = sum(one.length for one in sent.values())
        for who in cohort:
            outcome = outcomes.get(who.client, Failure(who.client, "did not answer"))
            if isinstance(outcome, Failure):
                answers.failures.append(outcome)
            else:
                answers.replies.append(outcome[0])
                answers.reports.append(outcome[1])
        return answers

    def _accept(self, done: Done, sent: SentJob, round: int) -> tuple[Reply, dict[str, Any]] | Failure:
        """Decode and validate one reply. An invalid reply becomes a Failure of this client; the round goes on."""
        if done.reply is None:
            return Failure(done.client, done.failure)
        try:
            return check_upload(self._setup.at(round), decode(done.reply), sent, round)
        except BadMessage as error:
            return Failure(done.client, str(error))

    def gather(self, kind: str, answer: str, server: Server, clients: Sequence[Participant], store: States) -> Gathered:
        """Send evaluation, calibration or storing jobs for the server's current model, and return the valid replies.

        Raise NoValidReply if there is none, Diverged if that is because their numbers are not finite.
        """
        setup = self._setup.at(server.round)
        networks = {who.capacity: setup.network(who.capacity) for who in clients}
        view = setup.method.prepare(server.silenced(), networks, training=False)
        asked, gathered, diverged = {who.client: who for who in clients}, Gathered(), 0

        def counted(jobs: Iterator[Job]) -> Iterator[Job]:
            for job in jobs:
                gathered.moved += len(job.message)
                yield job

        for done in self._engine.run(self._setup, counted(self.jobs(kind, server, view, clients, store))):
            if done.late:
                continue
            gathered.moved += len(done.reply or b"")
            try:
                if done.client not in asked:
                    raise BadMessage("was not asked")
                message = decode(done.reply or b"")
                check_report(setup.task, answer, message, asked[done.client], server.round)
                if answer == "calibrated":
                    check_statistics(message, setup.network(asked[done.client].capacity))
            except BadMessage as error:
                gathered.bad += 1
                diverged += isinstance(error, NotFinite)
                continue
            gathered.messages[done.client] = message
        if not gathered.messages:
            why = Diverged if diverged == gathered.bad > 0 else NoValidReply
            raise why(f"no client sent a valid reply to a job of kind {kind!r}")
        gathered.messages = dict(sorted(gathered.messages.items()))
        return gathered
