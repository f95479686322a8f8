"""A run directory: what a recipe left behind, and how it carries on.

```
recipe.toml     resolved: every default written out
task.json       what can be known without the data: classes, clients, who has what, the shape of an input
metrics.jsonl   one event a line, only appended to
checkpoint/     the last committed round: the server's tensors and the clients' states
kept/           rounds that the recipe asked to keep, with private states
trace.json      where the time went, if `--profile` was given
flower.json     on Flower: what the run is called on the nodes' disks, and who its clients are
summary.json    final and best accuracy, bytes, seconds, hashes, versions; written when the run is done
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
from fedfactor.runs.directory import _write, check_claim, locked
from fedfactor.runs.recipe import Recipe
from fedfactor.runs.tasks import Facts, setup_of, task_of
from fedfactor.server.federation import Federation
from fedfactor.server.result import Result
from fedfactor.server.store import DiskStore, Journal
from fedfactor.task import Task

Begin = Callable[[Recipe], tuple[Recipe, Task, Facts]]
"""Finds a recipe's task; what is only known now, of the clients' capacities say, goes into the recipe it returns."""


def run(
    recipe: Recipe,
    directory: Path | str | None = None,
    *,
    resume: bool = False,
    engine: Engine | None = None,
    data_dir: Path | str | None = None,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    begin: Begin | None = None,
) -> Result:
    """Run a recipe in a directory (or in memory), or carry on with what is there.

    `begin` takes the place of loading the recipe's data, once the directory is ours.
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
        # Only now: a start that fails leaves the directory to the next one.
        _write(directory / "task.json", json.dumps(facts))
        _write(directory / "recipe.toml", recipe.to_toml())
        result = Result(federation, federation.run())
        _write(directory / "summary.json", json.dumps(summary_of(result), indent=1))
        return result


def summary_of(result: Result) -> dict[str, Any]:
    """Return what `summary.json` holds."""
    found = result.summary
    measured = next((key for key in ("all", "global", "selected_after") if key in found), "")
    scores: dict[str, Any] = found.get(measured, {})
    totals = found["totals"] or result.server.totals
    return {
        "final_accuracy": scores.get("final"),
        "best_accuracy": scores.get("best"),
        "accuracy_of": measured,
        "rounds": found["rounds"],
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
