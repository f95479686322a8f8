"""What is measured, on whose data and when: every figure is stored with its protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedfactor import cost
from fedfactor.nn.norms import batch_norms, with_statistics
from fedfactor.nn.state import tensors_of
from fedfactor.profile import timed
from fedfactor.protocol.engine import Job
from fedfactor.protocol.message import BadMessage, Message, decode, encode, expect
from fedfactor.protocol.method import Participant
from fedfactor.protocol.setup import Setup, kept_of
from fedfactor.protocol.states import HeldTensors, States
from fedfactor.protocol.validation import _statistics_of, check_report
from fedfactor.rng import derive, seeded
from fedfactor.server.events import spread
from fedfactor.task import like

if TYPE_CHECKING:
    from fedfactor.server.federation import Federation, Server

LINKS_MBPS = (2, 10, 50)


class Evaluator:
    """Measures a federation's models and costs; it never changes them."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self._macs: dict[tuple[str, float], float] = {}
        self.moved = 0
        """Bytes that calibration and evaluation have moved, both ways, since this was last set to 0."""
        self.bad = 0
        """Bad answers among them."""

    def protocol(self) -> dict[str, Any]:
        """Say in words what the figures of this run mean."""
        method, rounds = self.federation.setup.method, self.federation.rounds
        return {
            "global": "the server's model on the central test set, at every capacity it is used at"
            if self._has_global_model()
            else "none: part of every model is private",
            "clients": {
                "none": "not measured",
                "selected": "this round's clients on their own test data, before and after their local training",
                "all": "all clients on their own test data, with the new server model and what each keeps; and this "
                "round's before and after their local training",
            }[rounds.evaluate_clients],
            "limit": f"{rounds.evaluate_limit} clients, always the same, stand for all"
            if rounds.evaluate_limit
            else "none",
            "worst_decile": "mean of the lowest tenth of the clients",
            "best": "the round of the highest mean accuracy, chosen on the test data that it is measured on",
            "every": rounds.evaluate_every,
            "norm_statistics": "of deployed models estimated on all clients' training data, of a client's own scores "
            "those of its test batches"
            if method.calibrates
            else "as trained",
            "loss": "mean of what the clients minimise while they train, penalties included",
            "macs": "forward multiply-accumulates of the clients' training examples; composing included",
            "link": "FedPara D.1: seconds of the slowest client's work (its own tests included) plus bytes over speed",
            "bytes": "of training; those of calibration are counted apart, those of evaluation are not counted",
            "dense_bytes": "of messages with the dense model, down and up: what plain FedAvg moves a client and round",
            "weights": "uniform" if self.federation.setup.optimizer.uniform else method.weighting,
        }

    def due(self, round: int) -> bool:
        """Tell whether a round, counted from 1, is evaluated."""
        every, last = self.federation.rounds.evaluate_every, self.federation.rounds.rounds
        return round == last or (every > 0 and round % every == 0)

    @timed("evaluating")
    def add(
        self,
        event: dict[str, Any],
        server: Server,
        reports: list[dict[str, Any]],
        store: States,
    ) -> None:
        """Put the measurements of a round into its event, where they are due; `store` has the round's outcome."""
        if not self.due(server.round):
            return
        federation, method = self.federation, self.federation.setup.at(server.round).method
        central = federation.setup.task.data.central
        if central is not None and self._has_global_model():
            levels = method.served(federation.capacities.levels)
            self.moved = 0
            event["global"] = {
                f"{level:g}": federation.setup.task.evaluate(self.deployed(server, level), central) for level in levels
            }
            if method.calibrates:
                event["bytes_calibration"] = self.moved
        if federation.rounds.evaluate_clients == "none":
            return
        for when in ("before", "after"):
            scores = {report["client"]: report[when] for report in reports if isinstance(report.get(when), dict)}
            if scores:
                event[f"selected_{when}"] = spread(scores)
        if federation.rounds.evaluate_clients == "all":
            scores = self._all_clients(server, store)
            if scores:
                event["all"] = spread(scores)
        if self.bad:
            event["bad_evaluations"], self.bad = self.bad, 0

    def _has_global_model(self) -> bool:
        setup = self.federation.setup
        return setup.method.has_global_model(setup.network(1.0))

    def _all_clients(self, server: Server, store: States) -> dict[int, dict[str, float]]:
        everyone = [self.federation.participant(client, server.round) for client in self._everybody()]
        found = self._gather("evaluate", "evaluated", server, everyone, store)
        scores = {client: message.fields["scores"] for client, message in found.items()}
        return {client: score for client, score in scores.items() if score is not None}

    def _everybody(self) -> list[int]:
        """Return all clients, or those that stand for them."""
        federation = self.federation
        return federation.rounds.measured(federation.setup.training.seed, federation.population)

    def _gather(
        self, kind: str, answer: str, server: Server, everyone: list[Participant], store: States
    ) -> dict[int, Message]:
        """Send everybody a job and return the good answers by client, in ascending order; bad ones are left out."""
        federation, setup = self.federation, self.federation.setup.at(server.round)
        capacities = {who.capacity for who in everyone}
        view = setup.method.prepare(server.tensors, {capacity: setup.network(capacity) for capacity in capacities})
        asked = {who.client: who for who in everyone}
        found: dict[int, Message] = {}

        def counted(jobs: Iterator[Job]) -> Iterator[Job]:
            for job in jobs:
                self.moved += len(job.parcel)
                yield job

        jobs = federation.jobs(kind, server, view, everyone, store=store)
        for done in federation.engine.run(federation.setup, counted(jobs)):
            if done.late:
                continue
            self.moved += len(done.reply or b"")
            try:
                if done.client not in asked:
                    raise BadMessage("was not asked")
                message = decode(done.reply or b"")
                check_report(answer, message, asked[done.client], server.round)
                if answer == "calibrated":
                    expect(message.tensors, _statistics_of(setup.network(asked[done.client].capacity)), "statistics")
            except BadMessage:
                self.bad += 1
                continue
            found[done.client] = message
        if not found:
            raise RuntimeError(f"no client answered well to a job of kind {kind!r}")
        return dict(sorted(found.items()))

    def deployed(self, server: Server, capacity: float) -> nn.Module:
        """Return the server's model at a capacity as a plain module, with its norm statistics."""
        setup = self.federation.setup.at(server.round)
        kept = {} if self._has_global_model() else setup.kept(capacity)
        model = setup.method.deploy(server.tensors, setup.network(capacity), capacity, kept)
        return with_statistics(model, self._statistics(server, capacity)) if self._calibrated(model) else model

    def personal(self, server: Server, who: Participant) -> nn.Module:
        """Return a client's own model as a plain module."""
        setup, store = self.federation.setup.at(server.round), self.federation.store
        kept = kept_of(self.federation.setup, store.read("client", who.client), server.round).get("kept")
        network, tensors = setup.network(who.capacity), server.tensors
        if setup.method.space == "personal":  # what the server has of this client's own
            plan = setup.method.plan(tensors, who, network, None)
            tensors = setup.method.download(tensors, who, plan, HeldTensors(store, "server"), network)
        model = setup.method.deploy(tensors, network, who.capacity, kept or setup.kept(who.capacity))
        return with_statistics(model, self._statistics(server, who.capacity)) if self._calibrated(model) else model

    def _calibrated(self, model: nn.Module) -> bool:
        """Tell whether a deployed model needs statistics from the clients."""
        return self.federation.setup.method.calibrates and bool(batch_norms(model))

    def _statistics(self, server: Server, capacity: float) -> dict[str, Tensor]:
        """Average the batch statistics that all clients find with the server's model on their data, once a round."""
        if capacity in server.statistics:
            return server.statistics[capacity]
        everyone = [Participant(client, capacity, server.round) for client in self._everybody()]
        replies = self._gather("calibrate", "calibrated", server, everyone, self.federation.store)
        total = sum(reply.fields["samples"] for reply in replies.values())
        summed: dict[str, Tensor] = {}
        for reply in replies.values():
            for name, tensor in reply.tensors.items():
                share = reply.fields["samples"] / total
                summed[name] = summed.get(name, torch.zeros_like(tensor)) + share * tensor
        server.statistics[capacity] = summed
        return summed

    def macs(self, capacity: float, round: int = 0) -> float:
        """Return the forward multiply-accumulates of a training example of a client of this capacity in a round."""
        setup = self.federation.setup.at(round)
        return sum(count * self._forward_macs(setup, level) for level, count in setup.method.passes(capacity).items())

    def _forward_macs(self, setup: Setup, capacity: float) -> float:
        """Count one pass of one example; a batch composes its weights once."""
        key = repr(setup.method), capacity
        if key not in self._macs:
            network, data = setup.network(capacity).train(), setup.task.data
            example = data.transform.test(data.train[0][: setup.training.batch])
            first = next(iter(network.parameters()), torch.empty(0))
            self._macs[key] = cost.measure(network, like(example, first)).macs / len(example)
        return self._macs[key]

    def dense_bytes(self) -> int:
        """Return what a client of plain FedAvg would move in a round, down and up, in messages like a round's."""
        setup = self.federation.setup
        with seeded(derive(setup.training.seed, "init")):  # whatever is drawn here is drawn for nothing
            tensors = tensors_of(setup.task.build())
        fields = {"client": 0, "round": 0, "capacity": 1.0, "lr": setup.training.lr, "test": False}
        message = Message("train", fields, {f"model/{name}": tensor for name, tensor in tensors.items()})
        return 2 * len(encode(message))

    def links(self, down: int, up: int, busy: float, clients: int) -> dict[str, Any]:
        """Return seconds of a round on slow links, and its energy where the recipe says what a byte costs."""
        size = (down + up) / clients
        seconds = {f"{mbps}": busy + cost.link_seconds(size, mbps, transfers=1) for mbps in LINKS_MBPS}
        joules = self.federation.rounds.joules_per_byte
        return {"link_seconds": seconds} | ({} if joules is None else {"joules": joules * (down + up)})
