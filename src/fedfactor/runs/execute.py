"""Running a recipe in a run directory, and resuming it.

```
recipe.toml     the recipe with all defaults written out
task.json       facts about the task, to use the run without its data: classes, clients, shape of an input
metrics.jsonl   one event per line, append-only
checkpoint/     the last committed round: the server's tensors and the clients' states; in a deployment with
                differential privacy, also `secret`, the seed of cohorts and noise
kept/           the rounds listed in `run.keep_rounds`, with private states
trace.json      where the time was spent, if `--profile` was given
flower.json     on Flower: the run's name on the nodes' disks, and its clients; on a node: which client it is
summary.json    final and best accuracy, bytes, seconds, hashes, versions; written when the run is finished
```
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedfactor.engines import Engine, Inline
from fedfactor.protocol.fleet import MEASURED, Fleet
from fedfactor.protocol.settings import check_device_here
from fedfactor.protocol.setup import Setup
from fedfactor.runs.directory import RunError, check_claim, committed, locked, read_summary
from fedfactor.runs.recipe import Recipe, with_base
from fedfactor.runs.tasks import Facts, facts_with_base, setup_of, task_of
from fedfactor.server.costs import training_speed
from fedfactor.server.federation import Federation
from fedfactor.server.result import Result
from fedfactor.server.store import Damaged, DiskStore, Journal
from fedfactor.support.files import write_atomically
from fedfactor.support.secret import secret_seed
from fedfactor.task import Task

Begin = Callable[[Recipe], tuple[Recipe, Task, Facts]]
"""Builds a recipe's task. The recipe it returns may have settings that are known only now, such as capacities."""


def run(
    recipe: Recipe,
    directory: Path | str | None = None,
    *,
    resume: bool = False,
    engine: Engine | None = None,
    data_dir: Path | str | None = None,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    begin: Begin | None = None,
    end: Callable[[Result], None] = lambda result: None,
    deployed: bool = False,
) -> Result:
    """Run a recipe in a directory (in memory if it is `None`), or resume the run in the directory.

    `begin` replaces loading the recipe's data; it is called once the directory is locked. `end` is called after the
    last round, before the run counts as finished. With `deployed`, differential privacy uses a secret seed.
    """
    check_device_here(recipe.training.device)
    begin = begin or (lambda recipe: (recipe, *task_of(recipe, data_dir)))
    if directory is None:
        recipe, task, _ = begin(recipe)
        setup, engine = setup_of(recipe, task), engine or Inline()
        fleet = _with_speed(recipe.fleet, setup, {})
        federation = Federation(
            setup,
            recipe.rounds,
            engine,
            recipe.capacities,
            on_event=on_event,
            fleet=fleet,
            aggregation=recipe.aggregation,
            buffering=recipe.buffering,
        )
        _check_base(recipe, federation)
        return Result(federation, federation.run())
    directory = Path(directory)
    with locked(directory):
        check_claim(recipe, directory, resume)
        recipe, task, facts = begin(recipe)
        setup, path = setup_of(recipe, task), directory / "task.json"
        fleet = _with_speed(recipe.fleet, setup, facts, json.loads(path.read_text()) if path.exists() else {})

        def listen(event: dict[str, Any]) -> None:
            # Written only now: a failed start leaves the directory free, and a refused resumption leaves it as it is.
            if event["event"] in ("start", "resumed"):
                write_atomically(path, json.dumps(facts_with_base(facts, setup)))
                write_atomically(directory / "recipe.toml", with_base(recipe, setup.base_sha256).to_toml())
                if event.get("round", 0) < recipe.rounds.rounds:  # the run was finished, and is now extended
                    (directory / "summary.json").unlink(missing_ok=True)
            on_event(event)

        path_of_seed, fresh = directory / "checkpoint" / "secret", committed(directory) < 0
        secret = secret_seed(path_of_seed, fresh=fresh) if deployed and recipe.privacy else None
        federation = Federation(
            setup,
            recipe.rounds,
            engine or Inline(),
            recipe.capacities,
            DiskStore(directory / "checkpoint", recipe.keep_rounds),
            Journal(directory / "metrics.jsonl"),
            listen,
            fleet,
            recipe.aggregation,
            recipe.buffering,
            secret,
        )
        _check_base(recipe, federation)
        result = Result(federation, federation.run())
        end(result)
        summary, before = result.summary, read_summary(directory) or {}
        for key in ("weights_sha256", "private_sha256"):
            if before.get(key, summary[key]) != summary[key]:
                raise Damaged(directory / "summary.json", f"its {key} is not that of the checkpoint")
        write_atomically(directory / "summary.json", json.dumps(summary, indent=1))
        return result


def _check_base(recipe: Recipe, federation: Federation) -> None:
    """Raise RunError if the recipe names another base than the model has."""
    wanted, found = recipe.tables.get("model", {}).get("base_sha256"), federation.setup.base_sha256
    if wanted and wanted != found:
        raise RunError(
            f"model.base_sha256: the recipe asks for the frozen base {wanted}, but the model has "
            f"{found or 'no frozen parameters'}. Use the weights that the recipe was written for, or remove the key"
        )


def _with_speed(fleet: Fleet | None, setup: Setup, facts: Facts, before: Facts | None = None) -> Fleet | None:
    """Return a fleet with the speed of this machine where it is to be measured.

    The speed is recorded in `facts`; a run that is resumed takes it from its earlier facts.
    """
    if fleet is None or setup.task.data.described or all(one.speed != MEASURED for one in fleet.devices.values()):
        return fleet
    facts["speed"] = (before or {}).get("speed") or training_speed(setup)
    return fleet.with_speed(facts["speed"])
