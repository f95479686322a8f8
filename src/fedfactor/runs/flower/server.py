"""The server's side: enrol the nodes, then run the recipe in its directory as on any other engine.

A run that was stopped, wherever and however, is carried on by starting it again with the same run directory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedfactor.checks import check_choice
from fedfactor.data.clients import FederatedData
from fedfactor.engines.flower.adapter import Context, Grid
from fedfactor.engines.flower.engine import Flower
from fedfactor.engines.flower.roster import AGREED, Claim, Roster
from fedfactor.runs.directory import ENROLLED, reported
from fedfactor.runs.execute import run
from fedfactor.runs.flower.node import resolve_text
from fedfactor.runs.recipe import Recipe
from fedfactor.runs.tasks import Facts, task_of, task_with
from fedfactor.server.federation import QuorumLost
from fedfactor.server.result import Result
from fedfactor.task import Task

DEFAULTS: dict[str, bool | int | float | str] = {
    "data": "recipe",
    "data-dir": "",
    "deadline": 3600.0,
    "wait": 600.0,
    "poll": 0.5,
    "identity": "config",
    "lost-state": "fail",
    "device": "cpu",
}
"""Settings of a run on Flower beside `recipe` and `run-dir`; the words are explained in `docs/flower.md`."""


def serve(grid: Grid, context: Context) -> Result:
    """Run, or carry on, what an app's configuration says."""
    config = {**DEFAULTS, **context.run_config}
    check_choice("data", str(config["data"]), ("recipe", "nodes"))
    check_choice("identity", str(config["identity"]), ("config", "key"))
    check_choice("lost-state", str(config["lost-state"]), ("fail", "restart"))
    directory = Path(str(config["run-dir"]))
    if not directory.is_absolute():
        raise ValueError(f"run-dir is an absolute path on the server's host, got {str(directory)!r}")
    directory.mkdir(parents=True, exist_ok=True)
    recipe = resolve_text(str(config["recipe"]))
    # What clients compute on, they say themselves.
    training = dataclasses.replace(recipe.training, device=str(config["device"]))
    recipe = dataclasses.replace(recipe, training=training)
    roster = Roster(directory / ENROLLED, config["identity"] == "key", float(config["poll"]))
    engine = Flower(
        grid,
        roster,
        deadline=float(config["deadline"]),
        quorum=recipe.rounds.quorum,
        wait=float(config["wait"]),
        poll=float(config["poll"]),
        restart_lost=config["lost-state"] == "restart",
    )

    def begin(recipe: Recipe) -> tuple[Recipe, Task, Facts]:
        if config["data"] == "recipe":
            task, facts = task_of(recipe, str(config["data-dir"]) or None)
            roster.population = task.data.clients
            _enrol(engine)
        else:
            roster.population, roster.own_data = _population(recipe), True
            _enrol(engine)
            task, facts = _described(recipe, roster)
        return dataclasses.replace(recipe, capacities=reported(recipe.capacities, directory)), task, facts

    return run(recipe, directory, resume=True, engine=engine, on_event=_tell, begin=begin)


def _enrol(engine: Flower) -> None:
    """Wait for the nodes, and note what they said the first time; later words of theirs do not change a run."""
    roster = engine.roster
    came = roster.gather(engine.grid, roster.population, engine.wait)
    if came < max(1, math.ceil(engine.quorum * roster.population)):
        raise QuorumLost(
            f"{came} of {roster.population} clients came within {engine.wait:g} seconds, the quorum is "
            f"{engine.quorum:g}; what is in the run directory is intact, and why nodes were refused is in the log"
        )
    if roster.start:
        return
    claims = {client: roster.claims[node] for client, node in sorted(roster.here.items())}
    roster.start = {
        "facts": _common_facts(claims) if roster.own_data else {},
        "capacities": {str(client): claim.capacity for client, claim in claims.items() if claim.capacity is not None},
    }
    roster.save()


def _common_facts(claims: Mapping[int, Claim]) -> Facts:
    """Return what the first client's data are like, if all others' are like it."""
    first, facts = next((client, claim.facts) for client, claim in claims.items())
    for client, claim in claims.items():
        for key in AGREED:
            if claim.facts[key] != facts[key]:
                raise RuntimeError(
                    f"the clients' data differ: {key} is {facts[key]} for client {first} and {claim.facts[key]} for "
                    f"client {client}"
                )
    return facts


def _population(recipe: Recipe) -> int:
    clients = recipe.tables["partition"].get("clients")
    if not isinstance(clients, int):
        raise ValueError("every node has its own data: say in the recipe how many there are, by partition.clients")
    return clients


def _described(recipe: Recipe, roster: Roster) -> tuple[Task, Facts]:
    """Make a task of what the nodes say of their data: an example of zeros a client, as their models see theirs."""
    facts: dict[str, Any] = {**roster.start["facts"], "clients": roster.population}
    example = torch.zeros(facts["seen_shape"], dtype=getattr(torch, facts["seen_dtype"]))
    inputs = example.expand(roster.population, *example.shape)  # one in memory
    parts = [torch.tensor([client]) for client in range(roster.population)]
    data = FederatedData((inputs, torch.zeros(roster.population, dtype=torch.int64)), parts)
    return task_with(recipe, data, facts), facts


def _tell(event: dict[str, Any]) -> None:
    """Print a line a round, which Flower's log shows."""
    if event["event"] != "round":
        return
    words = [f"round {event['round']}: loss {event['loss']:.4f}"]
    for key in ("global", "all", "selected_after"):
        if key in event:
            scores = event[key] if "accuracy" in event[key] else event[key][max(event[key], key=float)]
            words.append(f"{key} accuracy {scores['accuracy']:.4f}")
    words += [f"client {failure['client']} failed ({failure['reason']})" for failure in event["failures"]]
    if "late" in event:
        words.append(f"{event['late']} late answers dropped")
    print("; ".join(words), flush=True)
