"""The server's side: the only loop over rounds."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedfactor.nn.state import tensors_of
from fedfactor.profile import span, timed
from fedfactor.protocol.coding import code_down, decode_down, decode_up, expected_up, sections
from fedfactor.protocol.engine import Done, Engine, Job
from fedfactor.protocol.message import BadMessage, Bytes, Message, Parcel, decode, encode, expect, finite
from fedfactor.protocol.method import Outcome, Participant
from fedfactor.protocol.optimizer import State, Step
from fedfactor.protocol.places import Places
from fedfactor.protocol.plan import Plan, Reply, Tensors, pull
from fedfactor.protocol.settings import Capacities, Rounds
from fedfactor.protocol.setup import Setup
from fedfactor.protocol.states import HeldTensors, States, pack, state_sha256
from fedfactor.protocol.validation import check_figures, check_report
from fedfactor.rng import torch_rng
from fedfactor.server.measure import Evaluator
from fedfactor.server.store import Changes, Journal, MemoryStore, Overlay, Store


class QuorumLost(RuntimeError):
    """Too few clients of a cohort answered well; the last committed round is intact."""


class Diverged(RuntimeError):
    """A round's outcome is not finite; it is not committed, and the last committed round is intact."""


@dataclass(frozen=True)
class Failure:
    """A client whose update was not used, and why."""

    round: int
    client: int
    reason: str

    def __post_init__(self) -> None:
        # Parts of a reason may be a stranger's words.
        object.__setattr__(self, "reason", self.reason[:LONGEST_REASON])


LONGEST_REASON = 300


@dataclass
class Asked:
    """A client that was sent a job, and what its reply will be measured against."""

    who: Participant
    plan: Plan
    reference: Tensors
    extras: Tensors
    length: int
    """Bytes that went down."""


@dataclass
class Answers:
    """What became of a cohort."""

    replies: list[Reply] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    """The plain fields of each reply, in the same order."""
    failures: list[Failure] = field(default_factory=list)
    states: dict[int, Bytes] = field(default_factory=dict)
    """New states of the clients whose replies are used."""
    bytes_down: int = 0
    bytes_up: int = 0
    busy: float = 0.0
    """Seconds that the slowest client worked."""
    late: int = 0
    """Answers to jobs of earlier rounds: dropped."""


@dataclass
class Server:
    """Everything the server carries from one round to the next."""

    round: int
    tensors: Tensors
    optimizer: State
    totals: dict[str, float] = field(default_factory=dict)
    statistics: dict[float, Tensors] = field(default_factory=dict)
    """Norm statistics by capacity, where they were gathered from the clients for this round."""

    def to_bytes(self) -> Bytes:
        """Write tensors, optimizer state and statistics."""
        extra = {f"optimizer/{kind}/{name}": t for kind, ts in self.optimizer.items() for name, t in ts.items()}
        model = {f"model/{name}": tensor for name, tensor in self.tensors.items()}
        norms = {f"norms/{level!r}/{name}": t for level, ts in self.statistics.items() for name, t in ts.items()}
        return encode(Message("server", {"kinds": sorted(self.optimizer)}, {**model, **extra, **norms}))

    @classmethod
    def from_bytes(cls, data: Bytes, info: dict[str, Any]) -> Server:
        """Read what `to_bytes` wrote."""
        message = decode(data)
        found = sections(message.tensors)
        kinds = sections(found.get("optimizer", {}))
        optimizer = {kind: kinds.get(kind, {}) for kind in message.fields["kinds"]}
        statistics = {float(level): tensors for level, tensors in sections(found.get("norms", {})).items()}
        return cls(info["round"], found.get("model", {}), optimizer, info["totals"], statistics)


@dataclass
class Federation:
    """One run: a setup that server and clients share, rounds, capacities, an engine and a store."""

    setup: Setup
    rounds: Rounds
    engine: Engine
    capacities: Capacities = field(default_factory=Capacities)
    store: Store = field(default_factory=MemoryStore)
    journal: Journal = field(default_factory=Journal)
    on_event: Callable[[dict[str, Any]], None] = lambda event: None
    """Is told of the events that the journal keeps, and of `resumed`, `answered` (by a client) and `committed`."""

    def __post_init__(self) -> None:
        setup = self.setup
        setup.fit(self.capacities.levels)
        reason = setup.method.refuses(setup.optimizer, setup.codec)
        if reason:
            raise ValueError(reason)
        self.population = setup.task.data.clients
        self.rounds.cohort_size(self.population)
        setup.method.check(setup.task, setup.network(1.0))
        self._check_levels()
        setup.method.phases(setup.training.epochs)  # says what is wrong with them before a client does
        self._levels = self.capacities.assign(setup.training.seed, self.population)
        keep = setup.optimizer.keeps_state or setup.codec.keeps_state
        self._sizes_change = keep and setup.method.adapts and self.capacities.dynamic
        """Whether clients keep tensors whose sizes change between rounds."""
        self.evaluator = Evaluator(self)

    def _check_levels(self) -> None:
        """Refuse capacities that change nothing: every client would hold the full model."""
        setup = self.setup
        if not setup.method.adapts:
            return
        counts = {x: sum(p.numel() for p in setup.network(x).parameters()) for x in (1.0, *self.capacities.levels)}
        for level, count in counts.items():
            if level < 1 and count == counts[1.0]:
                raise ValueError(
                    f"a client of capacity {level:g} would hold as many parameters as one of full capacity: "
                    f"{setup.method.name} finds nothing in this model that it can make smaller. A model that takes "
                    "width, or more inner layers, may help"
                )

    # What a round is made of.

    def run(self) -> Server:
        """Run all rounds that are not committed yet, and return the server as it ends."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the server's algebra too must have the same bits everywhere
        try:
            server = self._resume() or self._start()
            while server.round < self.rounds.rounds:
                server = self._round(server)
            return server
        finally:
            torch.set_num_threads(threads)

    def _start(self) -> Server:
        setup = self.setup.at(0)
        self._check_fit()
        tensors = self._first_tensors(setup)
        totals: dict[str, float] = {"bytes_down": 0, "bytes_up": 0, "macs": 0, "failures": 0}
        server = Server(0, tensors, self._first_state(setup, tensors), totals)
        dense = self.evaluator.dense_bytes()
        self._note({"event": "start", "dense_bytes": dense, "protocol": self.evaluator.protocol()})
        self._commit(server, {})
        return server

    def _check_fit(self) -> None:
        """Count the operations of the first round's model now: a model that cannot take the data fails here."""
        try:
            self.evaluator.macs(self.capacities.levels[0])
        except Exception as error:
            shape = " x ".join(map(str, self.setup.task.data.train[0].shape[1:]))
            raise ValueError(f"the model cannot take the data, examples of {shape or 'one number'}: {error}") from error

    def _first_tensors(self, setup: Setup) -> Tensors:
        # The server's space is on the CPU and in full precision, wherever and however clients train.
        start = setup.method.start(setup.network, self.capacities.levels)
        return {name: _wide(tensor.cpu()) for name, tensor in start.items()}

    def _first_state(self, setup: Setup, tensors: Tensors) -> State:
        weights = setup.method.weight_names(setup.network, tensors)
        return setup.optimizer.start({name: tensor for name, tensor in tensors.items() if name in weights})

    @cached_property
    def first(self) -> Tensors:
        """The server's tensors before the first round; computed again when somebody asks, since networks are reused."""
        setup = self.setup
        return self._first_tensors(Setup(setup.task, setup.method, setup.optimizer, setup.codec, setup.training).at(0))

    def _resume(self) -> Server | None:
        last = self.store.last()
        if last is None:
            self.journal.cut(0)
            return None
        data, info = last
        self._check_same_run(info["settings"])
        self.journal.cut(info["events"])
        self.on_event({"event": "resumed", "round": info["round"], "past": list(self.journal.events)})
        return Server.from_bytes(data, info)

    def settings(self) -> dict[str, str]:
        """What must not change when a run is carried on, in words: all but how long it is and what is measured."""
        setup, data = self.setup, self.setup.task.data
        training = {f.name: getattr(setup.training, f.name) for f in fields(setup.training)}
        shapes = {name: list(tensor.shape) for name, tensor in tensors_of(setup.network(1.0)).items()}
        found = {
            "method": setup.method,
            "optimizer": setup.optimizer,
            "codec": setup.codec,
            **training,
            "capacities": self.capacities,
            "cohort": self.rounds.cohort,
            "kind": setup.task.kind,
            "clients": f"{data.clients} (split {data.fingerprint})",
            "model": hashlib.sha256(str(shapes).encode()).hexdigest()[:12],
        }
        if "cosine" in str(setup.training.schedule):  # the only schedule that looks ahead
            found["rounds"] = self.rounds.rounds
        return {key: str(value) for key, value in found.items()}

    def _check_same_run(self, before: dict[str, str]) -> None:
        now = self.settings()
        changed = [
            f"{key} was {before.get(key)} and is now {now.get(key)}" for key in now if before.get(key) != now[key]
        ]
        if changed:
            raise ValueError(f"this run was started with other settings: {'; '.join(changed)}")

    def _round(self, server: Server) -> Server:
        setup, start, t = self.setup.at(server.round), time.perf_counter(), server.round
        clients = self.rounds.cohort_of(setup.training.seed, t, self.population)
        cohort = [self.participant(client, t) for client in clients]
        networks = {who.capacity: setup.network(who.capacity) for who in cohort}
        with span("server algebra"):
            view = setup.method.prepare(server.tensors, networks)
        answers = self._ask(server, view, cohort)
        replies = answers.replies
        self._check_quorum(t, len(cohort), len(replies), answers.failures)
        tensors, optimizer = self._step(server, view, replies)
        self._check_finite(t, tensors, optimizer)
        macs = round(sum(self.evaluator.macs(r.capacity, t) * r.samples for r in replies) * setup.training.epochs)
        cost = {"bytes_down": answers.bytes_down, "bytes_up": answers.bytes_up, "macs": macs}
        totals = {key: server.totals[key] + value for key, value in cost.items()}
        totals["failures"] = server.totals["failures"] + len(answers.failures)
        new = self._formed(Server(t + 1, tensors, optimizer, totals))
        event = {
            "event": "round",
            "round": t + 1,
            "cohort": clients,
            "capacities": [who.capacity for who in cohort],
            "loss": sum(report["loss"] for report in answers.reports) / len(replies),
            **cost,
            "totals": totals,
            "failures": [{"client": failure.client, "reason": failure.reason} for failure in answers.failures],
            **self.evaluator.links(answers.bytes_down, answers.bytes_up, answers.busy, len(cohort)),
        }
        if answers.late:
            event["late"] = answers.late
        due = self.evaluator.due(t + 1)
        outcome = Outcome(t + 1, server.tensors, tensors, view, replies, setup.network, lambda: self.first, due)
        with span("server algebra"):
            observed = setup.method.observe(outcome)
        if observed:
            event["observed"] = observed
        held = {client: pack(kept) for client, kept in setup.method.remember(replies).items()}
        changes = {"client": answers.states, "server": held}
        self.evaluator.add(event, new, answers.reports, Overlay(self.store, changes))
        event["seconds"] = time.perf_counter() - start
        self._note(event)
        self._commit(new, changes)
        return new

    def _formed(self, server: Server) -> Server:
        """Give the server the form of its coming round; with a new form the optimizer starts anew."""
        before, now = self.setup.at(server.round - 1), self.setup.at(server.round)
        if now is before:
            return server
        tensors = now.method.convert(server.tensors, before.network(1.0))
        return replace(server, tensors=tensors, optimizer=self._first_state(now, tensors))

    def _ask(self, server: Server, view: Tensors, cohort: list[Participant]) -> Answers:
        """Send the cohort its jobs and sort what comes back; replies are folded in the cohort's order."""
        asked: dict[int, Asked] = {}
        outcomes: dict[int, tuple[Reply, dict[str, Any]] | Failure] = {}
        answers, t = Answers(), server.round
        # The longest jobs first, so that none of them is left alone at the end.
        sizes = self.setup.task.data.train_of
        by_length = sorted(cohort, key=lambda who: -len(sizes[who.client]) * self.evaluator.macs(who.capacity, t))
        for done in self.engine.run(self.setup, self.jobs("train", server, view, by_length, asked)):
            if done.late:
                answers.late += 1
                continue
            if done.client not in asked or done.client in outcomes:
                answers.failures.append(Failure(t, done.client, "was not asked in this round, or answered twice"))
                continue
            answers.bytes_up += len(done.reply or b"")
            answers.busy = max(answers.busy, done.seconds)
            outcome = outcomes[done.client] = self._accept(done, asked[done.client], t)
            if not isinstance(outcome, Failure) and done.state is not None:
                answers.states[done.client] = done.state
            failed = outcome.reason if isinstance(outcome, Failure) else None
            self.on_event(
                {"event": "answered", "round": t + 1, "client": done.client, "failure": failed, "of": len(cohort)}
            )
        answers.bytes_down = sum(sent.length for sent in asked.values())
        for who in cohort:
            outcome = outcomes.get(who.client, Failure(t, who.client, "did not answer"))
            if isinstance(outcome, Failure):
                answers.failures.append(outcome)
            else:
                answers.replies.append(outcome[0])
                answers.reports.append(outcome[1])
        return answers

    @timed("server algebra")
    def _step(self, server: Server, view: Tensors, replies: list[Reply]) -> tuple[Tensors, State]:
        """Aggregate in the server's space; weights take the optimizer's step, buffers the mean."""
        setup = self.setup.at(server.round)
        counted = [replace(r, samples=1) for r in replies] if setup.optimizer.uniform else replies
        mean, held = setup.method.aggregate(server.tensors, view, counted, setup.network)
        names = setup.method.weight_names(setup.network, server.tensors)
        step = Step(
            {name: server.tensors[name] for name in names},
            {name: mean[name] for name in names},
            {name: held[name] for name in names},
            server.optimizer,
            replies,
            self.population,
        )
        stepped, state = setup.optimizer.step(step)
        return {name: stepped.get(name, mean[name]) for name in server.tensors}, state

    # Towards the clients.

    def participant(self, client: int, round: int) -> Participant:
        """Return a client with the capacity it has in a round."""
        if self.capacities.dynamic:
            level = self.capacities.redraw(self.setup.training.seed, round, client)
        else:
            level = self.capacities.levels[self._levels[client]]
        return Participant(client, level, round)

    def jobs(
        self,
        kind: str,
        server: Server,
        view: Tensors,
        cohort: Iterable[Participant],
        asked: dict[int, Asked] | None = None,
        store: States | None = None,
    ) -> Iterator[Job]:
        """Write each client's message when the engine is ready for it; note in `asked` what the reply must fit.

        `store` takes the place of the federation's own where a round's outcome is not committed yet.
        """
        setup, training, store = self.setup.at(server.round), self.setup.training, store or self.store
        held = HeldTensors(store, "server")
        broadcast = setup.optimizer.broadcast(server.optimizer) if kind == "train" else {}
        for who in cohort:
            network, trained = setup.network(who.capacity), setup.trained(who.capacity)
            rng = torch_rng(training.seed, "plan", server.round, who.client) if kind == "train" else None
            with span("server algebra"):
                plan = setup.method.plan(view, who, network, rng)
                down = setup.method.download(view, who, plan, held, network)
            coded = code_down(setup.codec, trained, down)
            extras = pull(broadcast, {name: piece for name, piece in plan.items() if piece.source in broadcast})
            fields: dict[str, Any] = {"client": who.client, "round": server.round, "capacity": who.capacity}
            fields["lr"] = training.rate(server.round, self.rounds.rounds)
            fields["test"] = kind == "train" and self.evaluator.due(server.round + 1)
            if kind == "train" and self._sizes_change:
                fields["places"] = Places({name: plan[name] for name in sorted(trained & plan.keys())}).written()
            tensors = {f"model/{n}": x for n, x in coded.items()} | {f"extra/{n}": x for n, x in extras.items()}
            parcel = Parcel(Message(kind, fields, tensors))
            if asked is not None:
                asked[who.client] = Asked(who, plan, decode_down(setup.codec, trained, coded), extras, len(parcel))
            yield Job(who.client, parcel, store.read("client", who.client))

    # Back from them.

    def _accept(self, done: Done, asked: Asked, round: int) -> tuple[Reply, dict[str, Any]] | Failure:
        """Decode and check one reply; whatever is wrong with it costs this client's update only."""
        if done.reply is None:
            return Failure(round, done.client, done.failure)
        try:
            return self._checked(decode(done.reply), asked, round)
        except BadMessage as error:
            return Failure(round, done.client, str(error))

    def _checked(self, message: Message, asked: Asked, round: int) -> tuple[Reply, dict[str, Any]]:
        setup, who = self.setup.at(round), asked.who
        report = check_report("trained", message, who, round)
        found = sections(message.tensors)
        model, extras = found.pop("model", {}), found.pop("extra", {})
        if found:
            raise BadMessage("tensors belong to neither the model nor the optimizer")
        trained = setup.trained(who.capacity)
        expect(model, expected_up(setup.codec, trained, asked.reference), "upload")
        expect(extras, setup.optimizer.expected(asked.extras), "optimizer's upload")
        tensors = decode_up(setup.codec, trained, model, asked.reference)
        # What is small in code may be large when decoded; what is not coded was looked at already.
        known = {name for name, tensor in tensors.items() if tensor is model.get(name)}
        coded, wanted = ({n: t for n, t in some.items() if n not in known} for some in (tensors, asked.reference))
        expect(coded, wanted, "decoded upload")
        figures = check_figures(report.get("figures", {}), setup.method.reports)
        return Reply(
            who.client, who.capacity, report["samples"], asked.plan, asked.reference, tensors, extras, figures
        ), report

    @timed("server algebra")
    def _check_finite(self, round: int, tensors: Tensors, optimizer: State) -> None:
        for name, tensor in [*tensors.items(), *(pair for kind in optimizer.values() for pair in kind.items())]:
            if not finite(tensor):
                raise Diverged(
                    f"round {round + 1}: the server's {name!r} is no longer finite; everything up to round {round} is "
                    "kept. A smaller learning rate, or clipping, may help"
                )

    def _check_quorum(self, round: int, asked: int, answered: int, failures: list[Failure]) -> None:
        if answered >= max(1, math.ceil(self.rounds.quorum * asked)):
            return
        lost = {
            "event": "lost",
            "round": round + 1,
            "failures": [{"client": f.client, "reason": f.reason} for f in failures],
        }
        self._note(lost)  # cut off again when the run is carried on
        reasons = "; ".join(f"client {f.client}: {f.reason}" for f in failures[:3])
        raise QuorumLost(
            f"round {round + 1}: {answered} of {asked} clients answered well, the quorum is {self.rounds.quorum:g} "
            f"({reasons}); everything up to round {round} is kept"
        )

    # What is kept.

    def _note(self, event: dict[str, Any]) -> None:
        self.journal.append(event)
        self.on_event(event)

    @timed("committing")
    def _commit(self, server: Server, changes: Changes) -> None:
        info = {"round": server.round, "totals": server.totals, "events": len(self.journal.events)}
        info["settings"] = self.settings()
        self.store.commit(server.round, changes, server.to_bytes(), info)
        self.on_event({"event": "committed", "round": server.round})

    def model(self, server: Server, capacity: float | None = None) -> nn.Module:
        """Return the server's model as a plain module."""
        return self.evaluator.deployed(server, capacity or self.capacities.levels[0])

    def client_model(self, server: Server, client: int) -> nn.Module:
        """Return a client's own model as a plain module."""
        return self.evaluator.personal(server, self.participant(client, server.round))


def _wide(tensor: Tensor) -> Tensor:
    """Give a tensor of less than full precision full precision."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def weights_sha256(tensors: Tensors) -> str:
    """Hash tensors in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def private_sha256(store: Store) -> str:
    """Hash the hashes of all clients' committed states, in the order of the clients; wherever the states are."""
    digest = hashlib.sha256()
    for section in ("client", "server"):
        for client in store.clients(section):
            digest.update(f"{section}:{client}:{state_sha256(store.read(section, client) or b'')}\n".encode())
    return digest.hexdigest()
