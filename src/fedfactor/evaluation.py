"""What is measured, on whose data and when: every figure is stored with its protocol."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedfactor import cost
from fedfactor.methods.base import Participant
from fedfactor.nn.norms import with_statistics
from fedfactor.task import like
from fedfactor.wire import decode

if TYPE_CHECKING:
    from fedfactor.federation import Federation, Server

LINKS_MBPS = (2, 10, 50)


class Evaluator:
    """Measures a federation's models and costs; it never changes them."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self._macs: dict[float, float] = {}

    def protocol(self) -> dict[str, Any]:
        """Say in words what the figures of this run mean."""
        method, rounds = self.federation.setup.method, self.federation.rounds
        return {
            "global": "the server's model on the central test set, at every capacity level"
            if self._has_global_model()
            else "none: part of every model is private",
            "clients": {
                "none": "not measured",
                "selected": "this round's clients on their own test data, before and after their local training",
                "all": "all clients on their own test data, with the new server model and what each keeps; and this "
                "round's before and after their local training",
            }[rounds.evaluate_clients],
            "worst_decile": "mean of the lowest tenth of the clients",
            "every": rounds.evaluate_every,
            "norm_statistics": "estimated on all clients' training data" if method.calibrates else "as trained",
            "macs": "forward multiply-accumulates of the clients' training examples; composing included",
            "link": "FedPara D.1: seconds of training (slowest client) plus bytes down and up over the speed",
            "weights": "uniform" if self.federation.setup.optimizer.uniform else method.weighting,
        }

    def due(self, round: int) -> bool:
        """Tell whether a round, counted from 1, is evaluated."""
        every, last = self.federation.rounds.evaluate_every, self.federation.rounds.rounds
        return round == last or (every > 0 and round % every == 0)

    def add(
        self,
        event: dict[str, Any],
        server: Server,
        reports: list[dict[str, Any]],
        states: dict[int, bytes],
    ) -> None:
        """Put the measurements of a round into its event, where they are due."""
        if not self.due(server.round):
            return
        federation = self.federation
        central = federation.setup.task.data.central
        if central is not None and self._has_global_model():
            levels = federation.capacities.levels if federation.setup.method.adapts else [1.0]
            event["global"] = {
                f"{level:g}": federation.setup.task.evaluate(self.deployed(server, level), central) for level in levels
            }
        if federation.rounds.evaluate_clients == "none":
            return
        for when in ("before", "after"):
            scores = [report[when] for report in reports if isinstance(report.get(when), dict)]
            if scores:
                event[f"selected_{when}"] = spread(scores)
        if federation.rounds.evaluate_clients == "all":
            scores = self._all_clients(server, states)
            if scores:
                event["all"] = spread(scores)

    def _has_global_model(self) -> bool:
        setup = self.federation.setup
        return setup.method.space != "personal" and not setup.method.private_names(setup.network(1.0))

    def _all_clients(self, server: Server, states: dict[int, bytes]) -> list[dict[str, float]]:
        federation = self.federation
        everyone = [federation._participant(client, server.round) for client in range(federation.population)]
        view = federation.setup.method.prepare(
            server.tensors, {who.capacity: federation.setup.network(who.capacity) for who in everyone}
        )
        jobs = federation._jobs("evaluate", server, view, everyone, {})
        # States of this round are not committed yet, so they are handed over beside the store's.
        jobs = (type(job)(job.client, job.message, states.get(job.client) or job.state) for job in jobs)
        found = {done.client: done for done in federation.engine.run(federation.setup, jobs)}
        replies = [found[client].reply for client in sorted(found)]
        scores = [decode(reply).fields["scores"] for reply in replies if reply is not None]
        return [score for score in scores if score is not None]

    def deployed(self, server: Server, capacity: float) -> nn.Module:
        """Return the server's model at a capacity as a plain module, with its norm statistics."""
        setup = self.federation.setup
        model = setup.method.deploy(server.tensors, setup.network(capacity), capacity, setup.kept(capacity))
        return with_statistics(model, self._statistics(server, capacity)) if setup.method.calibrates else model

    def personal(self, server: Server, who: Participant) -> nn.Module:
        """Return a client's own model as a plain module."""
        setup, store = self.federation.setup, self.federation.store
        state = store.read("client", who.client)
        tensors = decode(state).tensors if state else {}
        kept = {name.removeprefix("kept/"): t for name, t in tensors.items() if name.startswith("kept/")}
        network = setup.network(who.capacity)
        return setup.method.deploy(server.tensors, network, who.capacity, kept or setup.kept(who.capacity))

    def _statistics(self, server: Server, capacity: float) -> dict[str, Tensor]:
        """Average the batch statistics that all clients find with the server's model on their own data."""
        federation = self.federation
        everyone = [Participant(client, capacity) for client in range(federation.population)]
        view = federation.setup.method.prepare(server.tensors, {capacity: federation.setup.network(capacity)})
        jobs = federation._jobs("calibrate", server, view, everyone, {})
        replies = {d.client: decode(d.reply) for d in federation.engine.run(federation.setup, jobs) if d.reply}
        total = sum(reply.fields["samples"] for reply in replies.values())
        summed: dict[str, Tensor] = {}
        for client in sorted(replies):
            share = replies[client].fields["samples"] / total
            for name, tensor in replies[client].tensors.items():
                summed[name] = summed.get(name, torch.zeros_like(tensor)) + share * tensor
        return summed

    def macs(self, capacity: float) -> float:
        """Return the forward multiply-accumulates an example at a capacity; a batch composes its weights once."""
        if capacity not in self._macs:
            setup = self.federation.setup
            network, data = setup.network(capacity).train(), setup.task.data
            example = data.transform.test(data.train[0][: setup.training.batch])
            first = next(iter(network.parameters()), torch.empty(0))
            self._macs[capacity] = cost.measure(network, like(example, first)).macs / len(example)
        return self._macs[capacity]

    def links(self, down: int, up: int, busy: float, clients: int) -> dict[str, Any]:
        """Return seconds of a round on slow links, and its energy where the recipe says what a byte costs."""
        size = (down + up) / clients
        seconds = {f"{mbps}": busy + cost.link_seconds(size, mbps, transfers=1) for mbps in LINKS_MBPS}
        joules = self.federation.rounds.joules_per_byte
        return {"link_seconds": seconds} | ({} if joules is None else {"joules": joules * (down + up)})


def spread(scores: list[dict[str, float]]) -> dict[str, Any]:
    """Summarise clients' accuracies: mean, spread, worst decile, and every value."""
    values = [score["accuracy"] for score in scores]
    mean = sum(values) / len(values)
    lowest = sorted(values)[: max(1, math.ceil(len(values) / 10))]
    return {
        "accuracy": mean,
        "loss": sum(score["loss"] for score in scores) / len(scores),
        "std": math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)),
        "worst_decile": sum(lowest) / len(lowest),
        "clients": len(values),
        "each": values,
    }


def summary(events: list[dict[str, Any]], target: float | None = None) -> dict[str, Any]:
    """Reduce a run's events to last and best accuracy and to what reaching the target took."""
    rounds = [event for event in events if event["event"] == "round"]
    found: dict[str, Any] = {"rounds": len(rounds), "totals": rounds[-1]["totals"] if rounds else {}}
    for key in ("global", "all", "selected_after", "selected_before"):
        curve = [(event, _accuracy(event[key])) for event in rounds if key in event]
        if not curve:
            continue
        best = max(curve, key=lambda point: point[1])
        found[key] = {"final": curve[-1][1], "best": best[1], "best_round": best[0]["round"]}
        reached = next((event for event, value in curve if target is not None and value >= target), None)
        if target is not None:
            found[key]["target"] = target
            found[key]["reached"] = None if reached is None else {"round": reached["round"], **reached["totals"]}
    return found


def _accuracy(scores: dict[str, Any]) -> float:
    """Accuracy of a measurement; of the largest capacity where there are several."""
    if "accuracy" in scores:
        return float(scores["accuracy"])
    return float(scores[max(scores, key=float)]["accuracy"])
