"""Sends jobs to clients through the engine, and brings their replies into order."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from fedfactor.profile import span
from fedfactor.protocol.coding import code_down, decode_down, prefixed
from fedfactor.protocol.engine import Done, Engine, Job, StreamingEngine
from fedfactor.protocol.message import BadMessage, Bytes, Encoder, Message, NotFinite, decode
from fedfactor.protocol.method import Participant, same_for_all
from fedfactor.protocol.places import Places
from fedfactor.protocol.plan import Reply, Tensors, pull
from fedfactor.protocol.settings import Capacities, Rounds
from fedfactor.protocol.setup import Setup
from fedfactor.protocol.states import HeldTensors, States
from fedfactor.protocol.validation import (
    DIVERGED,
    SentJob,
    check_report,
    check_statistics,
    check_upload,
    longest_reply,
)
from fedfactor.rng import torch_rng
from fedfactor.server.replies import Answers, Diverged, Failure, NoValidReply, Outcome, SentJobs, Turns
from fedfactor.server.state import Server
from fedfactor.server.store import Store


@dataclass
class Exchange:
    """A round's training jobs and their replies."""

    server: Server
    view: Tensors
    """The server's tensors as the method prepared them for this round."""
    store: Store
    on_event: Callable[[dict[str, Any]], None]
    sent: SentJobs = field(default_factory=SentJobs)
    answers: Answers = field(default_factory=Answers)


@dataclass
class Gathered:
    """The replies of clients to evaluation, calibration or storing jobs."""

    messages: dict[int, Message] = field(default_factory=dict)
    """Valid replies by client, in ascending order."""
    moved: int = 0
    """Bytes in both directions."""
    bad: int = 0
    """Number of invalid replies."""


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
        self.tests_always = False
        """Whether all clients that train also measure their model: nobody knows in which round they will answer."""

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
        sent: SentJobs | None = None,
    ) -> Iterator[Job]:
        """Yield each client's job when the engine asks for it; record in `sent` what its reply is validated against."""
        setup, training, round = self._setup.at(server.round), self._setup.training, server.round
        held = HeldTensors(store, "server")
        broadcast = setup.optimizer.broadcast(server.optimizer) if kind == "train" else {}
        missed, longest = self.missed_moves(server, store), dict[float, int]()

        def prepared(who: Participant) -> tuple[SentJob, Tensors]:
            network, trained = setup.network(who.capacity), setup.trained(who.capacity)
            rng = torch_rng(training.seed, "plan", round, who.client) if kind == "train" else None
            with span("server algebra"):
                plan = setup.method.plan(view, who, network, rng)
                down = setup.method.download(view, who, plan, held, network)
            coded = code_down(setup.codec, trained, down)
            extras = pull(broadcast, {name: piece for name, piece in plan.items() if piece.source in broadcast})
            reference = {} if sent is None else decode_down(setup.codec, trained, coded)
            return SentJob(who, plan, reference, extras), coded

        def encoder_for(who: Participant) -> tuple[SentJob, Encoder]:
            job, coded = prepared(who)
            return job, Encoder(prefixed("model", coded) | prefixed("extra", job.extras) | missed(who.client))

        once = dict[float, tuple[SentJob, Encoder]]() if same_for_all(setup.method) else None
        for who in clients:
            if once is None:
                job, encoder = encoder_for(who)
            else:
                if who.capacity not in once:
                    once[who.capacity] = encoder_for(who)
                job, encoder = once[who.capacity]
                job = replace(job, who=who)
            fields: dict[str, Any] = {"client": who.client, "round": round, "capacity": who.capacity}
            fields["lr"] = training.rate(round, self._rounds.rounds)
            fields["test"] = kind == "train" and (self.tests_always or self._rounds.due(round + 1))
            if kind == "train" and self._places_change:
                trained = sorted(setup.trained(who.capacity) & job.plan.keys())
                fields["places"] = Places({name: job.plan[name] for name in trained}).written()
            if who.capacity not in longest:
                longest[who.capacity] = longest_reply(setup, kind, job)
            parts = encoder.parts(kind, fields)
            if sent is not None:
                sent.put(job, sum(map(len, parts)), partial(prepared, who))
            yield Job(who.client, parts, store.read("client", who.client), longest[who.capacity])

    def missed_moves(self, server: Server, store: States) -> Callable[[int], Tensors]:
        """Return a function from a client to the part of its job with the moves of the base that it has missed."""
        since = cache(server.moves.since)
        if getattr(self._engine, "restart_lost", False):  # any client may have lost its state
            return lambda client: since(0)
        # A client that took part in round t, counted from 1, got the moves of the rounds before it.
        return lambda client: since(max(0, store.version("client", client) - 1))

    def train(
        self,
        exchange: Exchange,
        cohort: Sequence[Participant],
        work: Callable[[Participant], float],
        fold: Callable[[Reply], None],
    ) -> None:
        """Train the cohort; call `fold` with each valid reply, in the order of the jobs and not of their arrival.

        `work` estimates the duration of a client's job. The longest jobs start first, so that none of them starts last;
        equal ones start in the order of the cohort. The clients' new states are staged in the store as they come.
        """
        order = sorted(cohort, key=lambda who: -work(who))
        store, sent, answers, failures = exchange.store, exchange.sent, exchange.answers, dict[int, Failure]()
        silent = {who.client: None for who in order}
        turns = Turns(silent, store.scratch, lambda client, data: self._accept(Done(client, data), sent.get(client)))

        def settle() -> None:
            for settled in turns.due():
                if isinstance(settled, Failure):
                    failures[settled.client] = settled
                    continue
                fold(settled[0])
                answers.reports.append(settled[1])
                sent.drop(settled[0].client)
                del settled  # before the next one is decoded

        def keep(client: int, outcome: Outcome, data: Bytes | None) -> None:
            del silent[client]
            turns.put(client, outcome, data or b"")

        jobs = self.jobs("train", exchange.server, exchange.view, order, store, sent)
        for _ in self._received(self._engine.run(self._setup, jobs), exchange, silent, len(cohort), keep):
            settle()
        for client in silent:
            turns.put(client, Failure(client, "did not answer"), b"")
        settle()
        answers.bytes_down = sent.bytes
        answers.failures += [failures[who.client] for who in cohort if who.client in failures]

    def stream(
        self,
        exchange: Exchange,
        clients: Iterable[Participant],
        room: int,
        awaited: Container[int],
        of: int,
        use: Callable[[int, Outcome, Bytes | None], None],
    ) -> Iterator[None]:
        """Keep `room` clients busy; call `use` as replies arrive, also those to jobs of earlier rounds.

        Yield after each, so that the caller can stop when it has enough of them.
        """
        assert isinstance(self._engine, StreamingEngine)  # `Buffering.refuses` checks this
        jobs = self.jobs("train", exchange.server, exchange.view, clients, exchange.store, exchange.sent)
        return self._received(self._engine.stream(self._setup, jobs, room), exchange, awaited, of, use)

    def _received(
        self,
        results: Iterable[Done],
        exchange: Exchange,
        awaited: Container[int],
        of: int,
        use: Callable[[int, Outcome, Bytes | None], None],
    ) -> Iterator[None]:
        """Call `use` with client, outcome and reply of each awaited result, in the order in which they come.

        Yield after each. Bytes up, late and unexpected results are counted in the answers, new states of clients
        staged in the store.
        """
        answers, version = exchange.answers, exchange.server.round + 1
        for done in results:
            if done.late:
                answers.late += 1
                continue
            if done.client not in awaited or done.client not in exchange.sent:
                answers.failures.append(Failure(done.client, "was not asked in this round, or answered twice"))
                continue
            answers.bytes_up += len(done.reply or b"")
            answers.busy = max(answers.busy, done.seconds)
            outcome = self._accept(done, exchange.sent.get(done.client))
            if not isinstance(outcome, Failure) and done.state is not None:
                exchange.store.stage(version, "client", done.client, done.state)
            failed = outcome.reason if isinstance(outcome, Failure) else None
            exchange.on_event(
                {"event": "answered", "round": version, "client": done.client, "failure": failed, "of": of}
            )
            use(done.client, outcome, done.reply)
            del done, outcome  # while the engine waits for the next one
            yield

    def _accept(self, done: Done, sent: SentJob) -> Outcome:
        """Decode and validate one reply. An invalid reply becomes a Failure of this client; the round goes on."""
        if done.reply is None:
            return Failure(done.client, done.failure, done.fault)
        try:
            round = sent.who.round
            return check_upload(self._setup.at(round), self._decoded(done.client, done.reply), sent, round)
        except BadMessage as error:
            return Failure(done.client, str(error), fault=not str(error).startswith(DIVERGED))

    def _decoded(self, client: int, reply: Bytes) -> Message:
        """Decode a reply. A client counts for no more examples than the engine knows it to have."""
        message = decode(reply)
        most = getattr(self._engine, "most_samples", lambda client: None)(client)
        if most is not None and type(message.fields.get("samples")) is int:
            message.fields["samples"] = min(message.fields["samples"], most)
        return message

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
                gathered.moved += sum(map(len, job.parts))
                yield job

        for done in self._engine.run(self._setup, counted(self.jobs(kind, server, view, clients, store))):
            if done.late:
                continue
            gathered.moved += len(done.reply or b"")
            try:
                if done.client not in asked:
                    raise BadMessage("was not asked")
                message = self._decoded(done.client, done.reply or b"")
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
