"""The server on Flower: enrol the nodes, then execute the recipe as on any other engine.

An interrupted run resumes when it is started again with the same run directory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfactor.engines.flower.adapter import Context, Grid
from fedfactor.engines.flower.engine import FlowerEngine
from fedfactor.engines.flower.roster import AGREED, Claim, Roster
from fedfactor.runs.directory import ENROLLED, reported
from fedfactor.runs.execute import run
from fedfactor.runs.flower.device import number_of_nodes, resolve_text
from fedfactor.runs.recipe import Recipe
from fedfactor.runs.tasks import Facts, data_without, may_have_base, setup_of, task_of, task_with
from fedfactor.server.events import privacy_line
from fedfactor.server.replies import NoValidReply, QuorumLost
from fedfactor.server.result import Result
from fedfactor.support.checks import check_choice
from fedfactor.support.memory import return_freed_blocks
from fedfactor.task import Decider, Task

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
"""Settings of a run on Flower in addition to `recipe` and `run-dir`; `docs/flower.md` explains them."""


def serve(grid: Grid, context: Context) -> Result:
    """Execute or resume the recipe in an app's configuration."""
    return_freed_blocks()
    config = {**DEFAULTS, **context.run_config}
    check_choice("data", str(config["data"]), ("recipe", "nodes"))
    check_choice("identity", str(config["identity"]), ("config", "key"))
    check_choice("lost-state", str(config["lost-state"]), ("fail", "restart"))
    directory = Path(str(config["run-dir"]))
    if not directory.is_absolute():
        raise ValueError(f"run-dir must be an absolute path on the server's machine, got {str(directory)!r}")
    directory.mkdir(parents=True, exist_ok=True)
    recipe = resolve_text(str(config["recipe"]))
    # The device of the server; each node configures its own.
    training = dataclasses.replace(recipe.training, device=str(config["device"]))
    recipe = dataclasses.replace(recipe, training=training)
    roster = Roster(directory / ENROLLED, config["identity"] == "key", float(config["poll"]))
    engine = FlowerEngine(
        grid,
        roster,
        deadline=float(config["deadline"]),
        quorum=recipe.rounds.quorum,
        wait=float(config["wait"]),
        poll=float(config["poll"]),
        restart_lost=config["lost-state"] == "restart",
    )

    deciders: list[Decider] = []

    def begin(recipe: Recipe) -> tuple[Recipe, Task, Facts]:
        if config["data"] == "recipe":
            task, facts = task_of(recipe, str(config["data-dir"]) or None)
            roster.population = task.data.clients
            roster.known_samples = lambda client: len(task.data.train_of[client])
            _check_base(recipe, task, roster)
            _enrol(engine)
        else:
            roster.population, roster.own_data = number_of_nodes(recipe), True
            _enrol(engine)
            task, facts = _described(recipe, roster)
            _check_base(recipe, task, roster)
        deciders.append(task.decider)
        return dataclasses.replace(recipe, capacities=reported(recipe.capacities, directory)), task, facts

    def end(result: Result) -> None:
        _hand_out(result, engine)

    def tell(event: dict[str, Any]) -> None:
        _tell(event, *deciders)

    return run(recipe, directory, resume=True, engine=engine, on_event=tell, begin=begin, end=end, deployed=True)


def _enrol(engine: FlowerEngine) -> None:
    """Wait for the nodes and store what they report the first time; later reports do not change the run."""
    roster = engine.roster
    came = roster.gather(engine.grid, roster.population, engine.wait)
    if came < max(1, math.ceil(engine.quorum * roster.population)):
        refused = "; ".join(f"node {node} was refused: {reason}" for node, reason in roster.refused[:3])
        raise QuorumLost(
            f"{came} of {roster.population} clients connected within {engine.wait:g} seconds, the quorum is "
            f"{engine.quorum:g}. {f'{refused}. ' if refused else ''}The run directory is intact"
        )
    if "capacities" in roster.start:
        return
    claims = {client: roster.claims[node] for client, node in sorted(roster.here.items())}
    roster.start |= {
        "facts": _common_facts(claims) if roster.own_data else {},
        "capacities": {str(client): claim.capacity for client, claim in claims.items() if claim.capacity is not None},
    }
    roster.save()


def _check_base(recipe: Recipe, task: Task, roster: Roster) -> None:
    """Let only nodes take part whose model has the same frozen base as the server's."""
    if not may_have_base(recipe):
        return
    setup = setup_of(recipe, task)
    setup.bind(recipe.capacities.levels)
    roster.start["base"] = setup.base_sha256
    for node in [node for node in roster.here.values() if roster.claims[node].base != setup.base_sha256]:
        roster.forget(node)  # it is asked again, and then refused with the reason


def _hand_out(result: Result, engine: FlowerEngine) -> None:
    """Send clients that have private parts the last model, from which they can export their own.

    Clients that are not connected are waited for. The roster records who received which round.
    """
    federation, server, roster = result.federation, result.server, engine.roster
    setup, now = federation.setup.at(server.round), str(result.server.round)
    if not (setup.kept(federation.capacities.levels[0]) or setup.method.traits.space == "personal"):
        return
    lacking = [client for client, known in sorted(roster.clients.items()) if known.setdefault("model", "") != now]
    roster.save()
    if not lacking:
        return
    roster.gather(engine.grid, len(roster.clients), engine.wait)
    asked = [federation.dispatch.participant(client, server.round) for client in lacking if client in roster.here]
    try:
        received = federation.dispatch.gather("store", "stored", server, asked, federation.store).messages
    except NoValidReply:  # the run is complete without it
        received = {}
    for client in received:
        roster.clients[client]["model"] = now
    roster.save()
    missed = ", ".join(str(client) for client in lacking if client not in received)
    print(f"{len(received)} clients stored the last model" + (f"; not clients {missed}" if missed else ""), flush=True)


def _common_facts(claims: Mapping[int, Claim]) -> Facts:
    """Return the description of the first client's data; raise RuntimeError if another client's data differ."""
    first, facts = next((client, claim.facts) for client, claim in claims.items())
    for client, claim in claims.items():
        for key in AGREED:
            if claim.facts[key] != facts[key]:
                raise RuntimeError(
                    f"the clients' data differ: {key} is {facts[key]} for client {first} and {claim.facts[key]} for "
                    f"client {client}"
                )
    return facts


def _described(recipe: Recipe, roster: Roster) -> tuple[Task, Facts]:
    """Build the task from the nodes' description of their data."""
    facts: dict[str, Any] = {**roster.start["facts"], "clients": roster.population}
    return task_with(recipe, data_without(facts), facts), facts


def _tell(event: dict[str, Any], decider: Decider) -> None:
    """Print one line per round, which appears in Flower's log."""
    if event["event"] != "round":
        return
    words = [f"round {event['round']}" + ("" if event["loss"] is None else f": loss {event['loss']:.4f}")]
    for key in ("global", "all", "selected_after"):
        if key in event:
            words.append(f"{key} {decider.name} {decider.of(event[key]):.4f}")
    words += [privacy_line(event["privacy"])] if "privacy" in event else []
    words += [f"client {failure['client']} failed ({failure['reason']})" for failure in event["failures"]]
    if "late" in event:
        words.append(f"{event['late']} late answers dropped")
    print("; ".join(words), flush=True)
