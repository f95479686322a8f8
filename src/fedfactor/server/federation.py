"""The server's side of a run, with the only loop over rounds."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any

from torch import Tensor, nn

from fedfactor.client.descent import check_optimizer
from fedfactor.nn.frozen import released
from fedfactor.nn.norms import batch_norms
from fedfactor.nn.state import tensors_of
from fedfactor.profile import span, timed
from fedfactor.protocol.aggregation import MEAN, Aggregation
from fedfactor.protocol.buffering import SYNCHRONOUS, Buffering
from fedfactor.protocol.engine import Engine, StreamingEngine
from fedfactor.protocol.fleet import Fleet
from fedfactor.protocol.message import finite
from fedfactor.protocol.method import Diagnostics, Networks, ObservedRound, Participant, Staged
from fedfactor.protocol.optimizer import State
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.sentences import RENAMED_KEYS
from fedfactor.protocol.settings import Capacities, Rounds
from fedfactor.protocol.setup import Setup
from fedfactor.protocol.states import States
from fedfactor.protocol.validation import DIVERGED
from fedfactor.rng import one_thread
from fedfactor.server.arrivals import Arrivals
from fedfactor.server.buffer import Buffer, Buffered
from fedfactor.server.calibrate import Calibration
from fedfactor.server.clock import Clock
from fedfactor.server.costs import Costs, link_costs
from fedfactor.server.deploy import deploy_global, deploy_personal
from fedfactor.server.dispatch import Dispatch, Exchange
from fedfactor.server.fold import RoundFold
from fedfactor.server.given import given_model, lost_weights, start_errors
from fedfactor.server.measure import measure_all, measure_global, measure_selected, protocol
from fedfactor.server.mode import Mode, Taking
from fedfactor.server.privacy import Protection, check_private
from fedfactor.server.replies import Diverged, Failure, QuorumLost
from fedfactor.server.state import Server
from fedfactor.server.store import Journal, MemoryStore, Store
from fedfactor.server.synchronous import Synchronous
from fedfactor.task import ACCURACY
from fedfactor.task.objective import loss_name

OPTIONAL = ("fleet", "aggregation", "buffering", "attack", "privacy")
"""Settings that a checkpoint names only if a run has them."""


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
    """Called with each event of the journal, and with `resumed`, `answered` (a client's reply) and `committed`."""
    fleet: Fleet | None = None
    """The devices of the clients, on which rounds are timed by a virtual clock."""
    aggregation: Aggregation = MEAN
    """How the server puts replies together."""
    buffering: Buffering = SYNCHRONOUS
    """When the server takes a step."""
    secret: int | None = None
    """The seed of cohorts and noise in a deployment with differential privacy; simulations use the run's seed."""

    def __post_init__(self) -> None:
        setup = self.setup
        setup.bind(self.capacities.levels)
        reason = setup.method.refuses(setup.optimizer, setup.codec, setup.training)
        if reason:
            raise ValueError(reason)
        if setup.training.own_norms and not any(
            norm.track_running_stats for norm in batch_norms(setup.network(1.0)).values()
        ):
            raise ValueError("train.own_norms: the network has no batch norms with running statistics")
        if setup.training.local_optimizer.keep_state and setup.method.traits.adapts and self.capacities.dynamic:
            raise ValueError(
                "train.optimizer.keep_state needs networks that keep their sizes: set capacities.dynamic = false"
            )
        self.population = setup.task.data.clients
        cohort = self.rounds.cohort_size(self.population)
        if reason := self.aggregation.refuses(setup.method, setup.optimizer, cohort):
            raise ValueError(reason)
        streams = isinstance(self.engine, StreamingEngine)
        if reason := self.buffering.refuses(setup.method, setup.optimizer, self.fleet, streams):
            raise ValueError(reason)
        if self.buffering.buffered and self.aggregation.strikes:
            raise ValueError('aggregation.strikes is for synchronous rounds, and rounds.mode is "buffered"')
        setup.network(1.0)  # raises ValueError if the method cannot be applied to the model
        network, trained = setup.network(self.capacities.levels[0]), setup.trained(self.capacities.levels[0])
        setup.task.check_outputs(network)
        check_optimizer(setup.training, setup.method.phases(network, setup.training.length), network, trained)
        if setup.base_sha256 and not setup.trained(1.0):
            raise ValueError(
                "all parameters of the model are frozen (requires_grad=False), so there is nothing to train"
            )
        self._check_levels()
        self.costs = Costs(setup)
        self.clock = Clock(self.fleet, setup, self.costs) if self.fleet else None
        if self.clock:
            self.capacities = self.clock.fitted(self.capacities)
        if setup.privacy:
            check_private(setup, self.rounds, self.capacities, self.fleet, self.secret is not None)
            if self.aggregation != MEAN or self.buffering.buffered:
                raise ValueError("privacy counts means of whole cohorts: leave out [aggregation] and [rounds]")
        self.dispatch = Dispatch(setup, self.rounds, self.capacities, self.engine)
        self._faults = Counter[int]()
        self._mode = self._chosen_mode()
        self._calibration: Calibration | None = None

    def _chosen_mode(self) -> Mode:
        buffering, rounds, population, seed = self.buffering, self.rounds, self.population, self.setup.training.seed
        if not buffering.buffered:
            return Synchronous(self.dispatch, self.clock, self._work, self._drawn, lambda: self.left_out)
        if not self.clock or not self.fleet:
            return Arrivals(buffering, rounds, population, seed, self.dispatch)
        buffer = Buffer(buffering, rounds, self.clock, population, seed, self.dispatch.participant)
        return Buffered(buffer, buffering, self.setup, self.dispatch, self._work, self.fleet.counts_energy)

    def _check_levels(self) -> None:
        """Raise ValueError if a lower capacity does not make the network smaller."""
        setup = self.setup
        if not setup.method.traits.adapts:
            return
        counts = {x: sum(p.numel() for p in setup.network(x).parameters()) for x in (1.0, *self.capacities.levels)}
        for level, count in counts.items():
            if level < 1 and count == counts[1.0]:
                raise ValueError(
                    f"a client of capacity {level:g} would hold as many parameters as one of full capacity: "
                    f"{setup.method.name} finds nothing in this model that it can make smaller. Use a model with a "
                    "width, or with more inner layers"
                )

    # Rounds.

    def run(self) -> Server:
        """Run all rounds that are not committed yet, and return the final server state."""
        self.setup.task.decider.check_target(self.rounds.target)
        with one_thread():
            last_round = self.last_round  # raises ValueError if no round fits the privacy budget
            server = self._resume() or self._start()
            while server.round < last_round:
                try:
                    server = self._round(server)
                except Diverged as error:
                    event = {"event": "diverged", "round": server.round + 1, "reason": str(error)}
                    self._note(event)  # removed again when the run is resumed
                    raise
            return server

    @cached_property
    def privacy(self) -> Protection | None:
        """Clipping, noise and their accounting. Raise ValueError if they are impossible; ImportError without the extra.

        It is made when a round needs it: solving for the noise takes seconds, and a run that is only read needs none.
        """
        setup = self.setup
        if setup.privacy is None:
            return None
        return Protection(setup.privacy, setup, self.rounds, self.capacities, self.secret)

    @property
    def last_round(self) -> int:
        """The last round of the run: that of its settings, or the last one that fits the privacy budget."""
        return self.privacy.last_round if self.privacy else self.rounds.rounds

    def _start(self) -> Server:
        setup = self.setup.at(0)
        # Each of these builds the model once more, so one after the other.
        dense = self.costs.dense_bytes()
        networks = cache(setup.initial)
        compared = self._compared_with_given(setup, networks(1.0))
        tensors = self._first_tensors(setup, networks)
        totals: dict[str, Any] = {"bytes_down": 0, "bytes_up": 0, "macs": 0, "failures": 0}
        totals |= self.clock.start if self.clock else {}
        server = Server(0, tensors, self._first_state(setup, tensors), totals)
        begun = {"event": "start", "dense_bytes": dense, "protocol": protocol(setup, self.rounds)}
        begun["metric"] = asdict(setup.task.decider)
        begun |= self.clock.described(self.capacities) if self.clock else {}
        begun |= {"privacy": self.privacy.described()} if self.privacy else {}
        self._note(begun | compared)
        self._commit(server)
        return server

    def _compared_with_given(self, setup: Setup, initial: nn.Module) -> dict[str, Any]:
        """Return the error of each weight that starts with another value than it was given, or a warning."""
        given = given_model(setup)
        errors = start_errors(initial, given)
        if all(error <= 1 for error in errors.values()):
            return {"start_errors": errors} if errors else {}
        lost = lost_weights(setup, given, errors)
        return {"warnings": [lost]} if lost else {}

    def _first_tensors(self, setup: Setup, networks: Networks) -> Tensors:
        # The server computes on the CPU in full precision, whatever device and dtype clients use.
        start = setup.method.initial(networks)
        return {name: _wide(tensor.cpu()) for name, tensor in start.items()}

    def _first_state(self, setup: Setup, tensors: Tensors) -> State:
        weights = setup.method.weight_names(setup.network, tensors)
        return setup.optimizer.start({name: tensor for name, tensor in tensors.items() if name in weights})

    @cached_property
    def first(self) -> Tensors:
        """The server's tensors before the first round."""
        setup = self.setup.at(0)
        return self._first_tensors(setup, cache(setup.initial))

    def _resume(self) -> Server | None:
        last = self.store.last()
        if last is None:
            self.journal.cut(0)
            return None
        data, info = last
        self._check_same_run(info["settings"])
        if info["round"] > self.rounds.rounds:
            raise ValueError(
                f"{info['round']} rounds are committed, more than train.rounds = {self.rounds.rounds}: a run cannot "
                f"become shorter. Set train.rounds to {info['round']} or more"
            )
        self.journal.cut(info["events"])
        for event in self.journal.events:
            self._count_faults(event)
        self.on_event({"event": "resumed", "round": info["round"], "past": list(self.journal.events)})
        return Server.from_bytes(data, info)

    def settings(self) -> dict[str, str]:
        """Return the settings that must not change when a run is resumed: all except its length and measurements."""
        setup, data = self.setup, self.setup.task.data
        training = {f.name: getattr(setup.training, f.name) for f in fields(setup.training)}
        training["local optimizer"] = training.pop("optimizer")
        shapes = {name: list(tensor.shape) for name, tensor in tensors_of(setup.network(1.0)).items()}
        found = {
            "method": setup.method,
            "optimizer": setup.optimizer,
            "codec": setup.codec,
            **training,
            "capacities": self.capacities,
            "cohort": self.rounds.cohort,
            "kind": setup.task.kind,
            **({"loss": loss_name(setup.task.objective)} if setup.task.objective else {}),
            "best": setup.task.decider,
            "clients": f"{data.clients} (split {data.fingerprint})",
            "inputs": data.inputs_fingerprint,
            "test data": data.test_fingerprint,
            "model": hashlib.sha256(str(shapes).encode()).hexdigest()[:12],
        }
        if setup.base_sha256:
            found["base"] = setup.base_sha256
        if self.fleet:
            found["fleet"] = self.fleet
        if self.aggregation != MEAN:
            found["aggregation"] = self.aggregation
        if self.buffering.buffered:
            found["buffering"] = self.buffering
        if setup.attack:
            found["attack"] = setup.attack
        if self.privacy:
            found["privacy"] = self.privacy.identity
        if setup.training.looks_ahead:
            found["rounds"] = self.rounds.rounds
        return {key: str(value) for key, value in found.items()}

    def _check_same_run(self, before: dict[str, str]) -> None:
        # A checkpoint from before a setting of [train] was renamed has its old name.
        before = {RENAMED_KEYS.get(f"train.{key}", key).removeprefix("train."): value for key, value in before.items()}
        now = self.settings()
        before.setdefault("best", str(ACCURACY))  # what decided in earlier versions
        changed = [
            f"{key} was {before.get(key)} and is now {now.get(key)}"
            for key in [*now, *(key for key in OPTIONAL if key in before and key not in now)]
            if before.get(key) != now.get(key)
        ]
        if changed:
            why = "; ".join(changed)
            raise ValueError(f"this run was started with other settings: {why}. Use those, or another directory")

    def _round(self, server: Server) -> Server:
        setup, start, t = self.setup.at(server.round), time.perf_counter(), server.round
        private, taking = self.privacy, self._mode.begin(server, self.store)
        self._check_in_time(t, taking)
        # With privacy, nothing depends on who takes part.
        known = taking.known and not private
        levels = [who.capacity for who in taking.training] if known else self.capacities.levels
        networks = {level: setup.network(level) for level in levels}
        with span("server algebra"):
            view = setup.method.prepare(server.tensors, networks, training=True)
        self.store.discard()  # what a round that failed has left
        protect = private.round(view, t, self.journal.events) if private else None
        fold = RoundFold(setup, server, view, self.store, self.aggregation, protect)
        exchange = Exchange(server, view, self.store, self.on_event)
        self._mode.train(exchange, fold.add)
        answers, reports, timeline = exchange.answers, exchange.answers.reports, taking.timeline
        del exchange  # with all that replies were validated against
        self._check_quorum(t, taking.wanted, len(fold.figures), answers.failures)
        spent = protect.finish(fold.method_fold) if protect else None
        tensors, optimizer = fold.step(self.population)
        moves = fold.moves
        self._check_finite(t, tensors | moves.total, optimizer, fold.largest)
        examples = [self.costs.examples(report["capacity"], report["samples"], t) for report in reports]
        macs = sum(self.costs.macs(r["capacity"], t) * count for r, count in zip(reports, examples, strict=True))
        macs = math.nan if private else macs  # clients do not tell how many examples they have
        cost = {"bytes_down": answers.bytes_down, "bytes_up": answers.bytes_up}
        counts: dict[str, Any] = {**cost, "macs": None if math.isnan(macs) else round(macs)}
        counts |= {"failures": len(answers.failures), **(timeline.counts if timeline else {})}
        before = server.totals
        sums = {key: None if None in (before[key], value) else before[key] + value for key, value in counts.items()}
        totals = before | sums  # an empty cohort takes no time on a fleet
        new = self._formed(Server(t + 1, tensors, optimizer, totals, untrained=fold.untrained, moves=moves))
        moved = answers.bytes_down + answers.bytes_up
        event = {
            "event": "round",
            "round": t + 1,
            "cohort": [who.client for who in taking.asked],
            "capacities": [who.capacity for who in taking.asked],
            "trained_capacities": [setup.method.trained_capacity(who.capacity) for who in taking.asked],
            "lr": setup.training.rate(t, self.rounds.rounds),
            "loss": None if private else _mean([report["loss"] for report in reports]),
            **cost,
            "macs": counts["macs"],
            "totals": totals,
            "failures": [failure.event() for failure in answers.failures],
            **link_costs(moved, answers.busy, len(taking.training), self.rounds.joules_per_byte),
            **self._mode.event(),
        }
        if self.left_out:
            event["left_out"] = self.left_out
        if spent:
            event["privacy"] = spent
        if answers.late:
            event["late"] = answers.late
        if isinstance(setup.method, Diagnostics) and not private:
            observed = self._observed(setup.method, server, tensors, view, fold)
            event |= {"observed": observed} if observed else {}
        del fold, view
        if self.rounds.due(t + 1) or t + 1 == self.last_round:
            new, figures = self._measured(new, reports, self.store.staged())
            event |= figures
        event["seconds"] = time.perf_counter() - start
        self._note(event)
        self._commit(new)
        return new

    @property
    def left_out(self) -> list[int]:
        """The clients that have sent so many invalid replies that they are not asked any more."""
        most = self.aggregation.strikes
        return [] if most is None else sorted(client for client, count in self._faults.items() if count >= most)

    def _drawn(self, round: int) -> list[int]:
        """Return the cohort of a round."""
        if self.privacy:
            return self.privacy.cohort_of(round)
        return self.rounds.cohort_of(self.setup.training.seed, round, self.population)

    def _check_in_time(self, t: int, taking: Taking) -> None:
        """Raise QuorumLost before anybody trains if too few clients of a fleet will be in time."""
        timeline = taking.timeline
        if timeline is None or timeline.waits:
            return
        used = timeline.of("used")
        if not used and timeline.of("late"):
            raise QuorumLost(f"round {t + 1}: {timeline.too_late()}{self._saved(t)}")
        self._check_quorum(t, taking.wanted, len(used), timeline.failures, "can answer in time")

    @timed("server algebra")
    def _observed(
        self, method: Diagnostics, server: Server, after: Tensors, view: Tensors, fold: RoundFold
    ) -> dict[str, Any]:
        """Return the method's figures of a round."""
        seen = ObservedRound(
            server.round + 1,
            server.tensors,
            after,
            view,
            fold.method_fold,
            fold.figures,
            fold.replies(),
            self.setup.at(server.round).network,
            lambda: self.first,
            self.rounds.due(server.round + 1),
        )
        return method.observe(seen)

    def _work(self, who: Participant) -> float:
        """Estimate the duration of a client's training job."""
        macs = self.costs.macs(who.capacity, who.round)
        seen = self.setup.training.seen(len(self.setup.task.data.train_of[who.client]), self.setup.training.length)
        return seen * (1.0 if math.isnan(macs) else macs)

    @timed("evaluating")
    def _measured(self, server: Server, reports: list[dict[str, Any]], store: States) -> tuple[Server, dict[str, Any]]:
        """Measure a new server state; return it with its norm statistics, and the figures.

        `store` has the clients' states as they will be when the round is committed.
        """
        setup, figures = self.setup.at(server.round), dict[str, Any]()
        calibration = Calibration(self.dispatch, server, self._clients_to_measure(), store)
        central, bad = setup.task.data.central, 0
        if central is not None and self.setup.has_global_model:
            levels = setup.method.served(self.capacities.levels)
            models = {level: deploy_global(self.setup, server, level, calibration) for level in levels}
            figures["global"] = measure_global(self.engine, self.setup, server.round, models)
            if setup.method.traits.calibrates:
                figures["bytes_calibration"] = calibration.moved
        if server.untrained:
            figures["untrained"] = {name: int(mask.sum()) for name, mask in server.untrained.items()}
        if self.rounds.evaluate_clients != "none":
            figures |= measure_selected(reports, setup.task.decider)
        if self.rounds.evaluate_clients == "all":
            found, bad = measure_all(self.dispatch, server, self._clients_to_measure(), store, setup.task.decider)
            figures |= found
        if bad + calibration.bad:
            figures["bad_evaluations"] = bad + calibration.bad
        return replace(server, statistics=calibration.statistics), figures

    def _clients_to_measure(self) -> list[int]:
        """Return the clients that are measured when all are to be."""
        return self.rounds.measured(self.setup.training.seed, self.population)

    def _formed(self, server: Server) -> Server:
        """Convert the server to the method's form in the next round; with a new form, the optimizer restarts."""
        before, now = self.setup.at(server.round - 1), self.setup.at(server.round)
        if now is before:
            return server
        assert isinstance(now.method, Staged)
        tensors = now.method.convert(server.tensors, before.network(1.0))
        return replace(server, tensors=tensors, optimizer=self._first_state(now, tensors))

    @timed("server algebra")
    def _check_finite(self, round: int, tensors: Tensors, optimizer: State, largest: int) -> None:
        for name, tensor in [*tensors.items(), *(pair for kind in optimizer.values() for pair in kind.items())]:
            if not finite(tensor):
                raise Diverged(
                    f"round {round + 1}: training diverged: the server's {name!r} is no longer finite, and client "
                    f"{largest} sent the largest numbers{self._saved(round)}. Try a "
                    "smaller learning rate (lr), or gradient clipping (max_grad_norm)"
                )

    def _check_quorum(
        self, round: int, asked: int, answered: int, failures: list[Failure], what: str = "sent a valid reply"
    ) -> None:
        if answered >= max(min(1, asked), math.ceil(self.rounds.quorum * asked)):  # a random cohort may be empty
            return
        lost = {
            "event": "lost",
            "round": round + 1,
            "failures": [failure.event() for failure in failures],
        }
        self._note(lost)  # removed again when the run is resumed
        clients: dict[str, list[int]] = {}
        for failure in failures:
            clients.setdefault(failure.reason, []).append(failure.client)
        reasons = [f"client {_some(who)}: {reason}" for reason, who in [*clients.items()][:3]]
        raise (Diverged if any(reason.startswith(DIVERGED) for reason in clients) else QuorumLost)(
            f"round {round + 1}: {answered} of {asked} clients {what}, the quorum is "
            f"{self.rounds.quorum:g} ({'; '.join(reasons)}){self._saved(round)}"
        )

    def _saved(self, round: int) -> str:
        """Return the end of an error that stops the run after a round; a run without a directory saves nothing."""
        return "" if isinstance(self.store, MemoryStore) else f"; everything up to round {round} is saved"

    # Journal and checkpoint.

    def _note(self, event: dict[str, Any]) -> None:
        self.journal.append(event)
        self._count_faults(event)
        self.on_event(event)

    def _count_faults(self, event: dict[str, Any]) -> None:
        self._faults.update(one["client"] for one in event.get("failures", ()) if one.get("fault"))

    @timed("committing")
    def _commit(self, server: Server) -> None:
        info = {"round": server.round, "totals": server.totals, "events": len(self.journal.events)}
        info["settings"] = self.settings()
        self.store.commit(server.round, server.to_parts(), info)
        self.on_event({"event": "committed", "round": server.round})

    # Models.

    def calibration(self, server: Server) -> Calibration:
        """Return the norm statistics of a server state; missing ones are estimated on the clients' data."""
        if self._calibration is None or self._calibration.server is not server:
            self._calibration = Calibration(self.dispatch, server, self._clients_to_measure(), self.store)
        return self._calibration

    def model(self, server: Server, capacity: float | None = None) -> nn.Module:
        """Return the server's model as a plain module."""
        level = capacity or self.capacities.levels[0]
        return released(deploy_global(self.setup, server, level, self.calibration(server)))

    def client_model(self, server: Server, client: int) -> nn.Module:
        """Return a client's own model as a plain module."""
        who = self.dispatch.participant(client, server.round)
        return released(deploy_personal(self.setup, server, who, self.store, self.calibration(server)))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _some(clients: list[int]) -> str:
    more = len(clients) - 5
    return ", ".join(map(str, clients[:5])) + (f" and {more} more" if more > 0 else "")


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in at least float32 if it is a floating-point tensor."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
