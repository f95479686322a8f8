"""Running a recipe in a run directory, and resuming it.

```
recipe.toml     the recipe with all defaults written out
task.json       facts about the task, to use the run without its data: classes, clients, shape of an input
metrics.jsonl   one event per line, append-only
checkpoint/     the last committed round: the server's tensors and the clients' states
kept/           the rounds listed in `run.keep_rounds`, with private states
trace.json      where the time was spent, if `--profile` was given
flower.json     on Flower: the run's name on the nodes' disks, and its clients; on a node: which client it is
summary.json    final and best accuracy, bytes, seconds, hashes, versions; written when the run is finished
```
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fedfactor
from fedfactor.engines import Engine, Inline
from fedfactor.protocol.settings import check_device_here
from fedfactor.runs.directory import check_claim, locked, write_atomically
from fedfactor.runs.recipe import Recipe
from fedfactor.runs.tasks import Facts, setup_of, task_of
from fedfactor.server.federation import Federation
from fedfactor.server.result import Result
from fedfactor.server.store import DiskStore, Journal
from fedfactor.task import Task

Begin = Callable[[Recipe], tuple[Recipe, Task, Facts]]
"""Builds a recipe's task. The recipe it returns may have settings that are known only now, such as capacities."""


RANKING = ("all", "global", "selected_after")
"""Measurements by which methods are ranked: the first one that all of them have."""


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
) -> Result:
    """Run a recipe in a directory (in memory if it is `None`), or resume the run in the directory.

    `begin` replaces loading the recipe's data; it is called once the directory is locked. `end` is called after the
    last round, before the run counts as finished.
    """
    check_device_here(recipe.training.device)
    begin = begin or (lambda recipe: (recipe, *task_of(recipe, data_dir)))
    if directory is None:
        recipe, task, _ = begin(recipe)
        setup, engine = setup_of(recipe, task), engine or Inline()
        federation = Federation(setup, recipe.rounds, engine, recipe.capacities, on_event=on_event)
        return Result(federation, federation.run())
    directory = Path(directory)
    with locked(directory):
        check_claim(recipe, directory, resume)
        recipe, task, facts = begin(recipe)
        federation = Federation(
            setup_of(recipe, task),
            recipe.rounds,
            engine or Inline(),
            recipe.capacities,
            DiskStore(directory / "checkpoint", recipe.keep_rounds),
            Journal(directory / "metrics.jsonl"),
            on_event,
        )
        # Written only now, so that a failed start leaves the directory free.
        write_atomically(directory / "task.json", json.dumps(facts))
        write_atomically(directory / "recipe.toml", recipe.to_toml())
        result = Result(federation, federation.run())
        end(result)
        write_atomically(directory / "summary.json", json.dumps(summary_of(result), indent=1))
        return result


def summary_of(result: Result) -> dict[str, Any]:
    """Return the contents of `summary.json`."""
    found = result.summary
    measured = next((key for key in RANKING if key in found), "")
    scores: dict[str, Any] = found.get(measured, {})
    totals = found["totals"] or result.server.totals
    return {
        "final_accuracy": scores.get("final"),
        "best_accuracy": scores.get("best"),
        "accuracy_of": measured,
        "rounds": found["rounds"],
        "trained_capacities": found["trained_capacities"],
        "bytes_up": totals["bytes_up"],
        "bytes_down": totals["bytes_down"],
        "macs": totals["macs"],
        "seconds": sum(event.get("seconds", 0.0) for event in result.history),
        "failures": totals["failures"],
        "weights_sha256": found["weights_sha256"],
        "private_sha256": found["private_sha256"],
        "measured": {key: found[key] for key in ("global", "all", "selected_before", "selected_after") if key in found},
        "versions": {
            "fedfactor": fedfactor.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
    }
