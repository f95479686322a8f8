"""Measurements: what is measured on which data. Each figure is stored with a description of its protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fedfactor.data.clients import count
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.engine import Engine, Job
from fedfactor.protocol.message import Encoder, decode
from fedfactor.protocol.settings import Rounds
from fedfactor.protocol.setup import Setup
from fedfactor.protocol.states import States
from fedfactor.protocol.validation import DIVERGED
from fedfactor.server.dispatch import Dispatch
from fedfactor.server.events import spread
from fedfactor.server.replies import Diverged
from fedfactor.server.state import Server
from fedfactor.task import BatchSums, Decider, Task


def protocol(setup: Setup, rounds: Rounds) -> dict[str, Any]:
    """Return descriptions of a run's figures."""
    traits, decider = setup.method.traits, setup.task.decider
    central, own = "the central test set", "their own test data"
    if setup.task.data.validation:
        central, own = "all training examples that clients hold out", "the training examples that they hold out"
    return {
        "global": f"the server's model on {central}, at each capacity at which it is used"
        if setup.has_global_model
        else "none: a part of each model is private",
        "clients": {
            "none": "not measured",
            "selected": f"this round's clients on {own}, before and after their local training",
            "all": f"all clients on {own}, with the new server model and their private tensors; and this "
            "round's clients before and after their local training",
        }[rounds.evaluate_clients],
        "limit": f"only {rounds.evaluate_limit} clients, always the same, are measured instead of all"
        if rounds.evaluate_limit
        else "none",
        "worst_decile": f"mean of the {decider.worst} tenth of the clients",
        "best": f"the round with the {decider.best} mean {decider.name}, chosen on the test data on which it is "
        "measured",
        "every": rounds.evaluate_every,
        "untrained": "output channels by tensor that no client has trained so far; they are silent in deployed models",
        "norm_statistics": "deployed models use statistics estimated on all clients' training data; a client's own "
        "scores use the statistics of its test batches"
        if traits.calibrates
        else "estimated on each client's own training data after download"
        if setup.training.own_norms
        else "as trained",
        "loss": "mean of the objective that clients minimise in training, penalties included",
        "macs": "forward multiply-accumulates of the clients' training examples; composing weights included",
        "link": "FedPara D.1: seconds of the slowest client's work, its evaluation included, plus bytes / link speed",
        "bytes": "bytes of training; those of calibration are counted separately, those of evaluation are not counted",
        "dense_bytes": "bytes of the dense model's messages, down and up: what plain FedAvg needs per client and round",
        "weights": "uniform" if setup.optimizer.uniform or setup.privacy else traits.weighting,
    }


def measure_global(engine: Engine, setup: Setup, round: int, models: Mapping[float, nn.Module]) -> dict[str, Any]:
    """Evaluate the server's models of several capacities on the central test set.

    Engines that share this machine's memory evaluate parts of whole batches in their workers. The sums of the batches
    are added in order, so the figures are those of one process. Metrics that are no sums, such as F1, need all batches
    in one process, which is this one. So does a model with a frozen base: its composed weights, which contain the base,
    are not sent. Raise Diverged if the deciding metric is not finite.
    """
    task, central = setup.task, setup.task.data.central
    assert central is not None
    batches = -(-count(central) // task.evaluation_batch)
    if not getattr(engine, "shares_memory", False) or batches < 2 or task.measures.accumulate or setup.base_sha256:
        return _checked({f"{level:g}": task.evaluate(model, central) for level, model in models.items()}, task, round)
    rows = -(-batches // MOST_PARTS) * task.evaluation_batch
    parts = [(level, first) for level in models for first in range(0, count(central), rows)]

    encoders = {level: Encoder(tensors_of(model)) for level, model in models.items()}

    def jobs() -> Iterator[Job]:
        for number, (level, first) in enumerate(parts):
            fields = {"client": number, "round": round, "capacity": level, "rows": [first, first + rows]}
            yield Job(number, encoders[level].parts("measure", fields), None)

    found: dict[int, list[BatchSums]] = {}
    for done in engine.run(setup, jobs()):
        if done.reply is None:
            raise RuntimeError(f"round {round}: the server's model could not be measured: {done.failure}")
        found[done.client] = decode(done.reply).fields["sums"]
    sums: dict[float, list[BatchSums]] = {level: [] for level in models}
    for number, (level, _) in enumerate(parts):
        sums[level] += found[number]
    return _checked({f"{level:g}": task.scores(each) for level, each in sums.items()}, task, round)


def _checked(scores: dict[str, dict[str, float]], task: Task, round: int) -> dict[str, Any]:
    if any(task.decider.name not in one for one in scores.values()):
        raise Diverged(f"round {round}: {DIVERGED}: the {task.decider.name} of the server's model is not finite")
    return scores


MOST_PARTS = 16
"""Most parts into which the central test set is divided: a worker gets the whole model with each part."""


def measure_selected(reports: list[dict[str, Any]], decider: Decider) -> dict[str, Any]:
    """Summarise the scores of this round's clients on their own test data, before and after their training."""
    found = {}
    for when in ("before", "after"):
        scores = {report["client"]: report[when] for report in reports if isinstance(report.get(when), dict)}
        if scores:
            capacities = {report["client"]: report["capacity"] for report in reports}
            found[f"selected_{when}"] = spread(scores, capacities, decider)
    return found


def measure_all(
    dispatch: Dispatch, server: Server, clients: list[int], store: States, decider: Decider
) -> tuple[dict[str, Any], int]:
    """Evaluate the new server model, with each client's private tensors, on the clients' own test data.

    Return the figures, and the number of invalid replies.
    """
    everyone = [dispatch.participant(client, server.round) for client in clients]
    gathered = dispatch.gather("evaluate", "evaluated", server, everyone, store)
    scores = {client: message.fields["scores"] for client, message in gathered.messages.items()}
    scores = {client: score for client, score in scores.items() if score is not None}
    capacities = {who.client: who.capacity for who in everyone}
    return {"all": spread(scores, capacities, decider)} if scores else {}, gathered.bad
