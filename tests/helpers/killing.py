"""Runs that are killed: a process of its own that ends itself, or is ended, and starts again until the run is done.

`python -m tests.helpers.killing exit METHODS DIR` ends forked children at every point of every commit in turn.
`python -m tests.helpers.killing command METHODS DIR` kills `fedfactor run` at random moments in forked children.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from fedfactor import cli, load
from fedfactor.runs.execute import run as run_recipe
from fedfactor.runs.recipe import read, resolve
from fedfactor.server import store
from fedfactor.testing.federation import outcome as outcome_of
from tests.helpers.tiny import run

ROUNDS = 2
POINTS = ("before", "states", "pointer")


def ending_at(point: str) -> None:
    """Make this process end itself at a point of its first commit."""
    commit, replace = store.DiskStore.commit, Path.replace

    def end(here: str) -> None:
        if here == point:
            os._exit(9)

    def commit_and_end(*arguments):  # type: ignore[no-untyped-def]
        end("before")
        commit(*arguments)

    def replace_and_end(path, target):  # type: ignore[no-untyped-def]
        pointer = Path(target).name == "current"
        end("states" if pointer else "")
        replace(path, target)
        end("pointer" if pointer else "")

    store.DiskStore.commit = commit_and_end  # type: ignore[method-assign]
    Path.replace = replace_and_end  # type: ignore[method-assign,assignment]


def start_child(work: Callable[[], None]) -> int:
    """Run a function in a forked child, which ends without tidying up, and return its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def in_child(work: Callable[[], None]) -> int:
    """Run a function in a forked child and return its exit code."""
    child = start_child(work)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(method: str, directory: Path | None, **settings: object) -> dict[str, object]:
    """What a finished run is compared by."""
    return outcome_of(run(method, rounds=ROUNDS, directory=directory, **settings))


def exit_everywhere(method: str, directory: Path) -> dict[str, object]:
    """End a run at every point of every commit, one after another, and return where it ended and how it differs."""
    expected = outcome(method, None)  # first: what it imports, the children need not
    reached: dict[str, list[str]] = {point: [] for point in POINTS}
    for _ in range(ROUNDS + 1):
        for point in POINTS:

            def killed(point: str = point) -> None:
                ending_at(point)
                outcome(method, directory)

            assert in_child(killed) == 9, f"{method} did not end at {point}"
            current = directory / "checkpoint" / "current"
            reached[point].append(current.read_text() if current.exists() else "nothing")
    found = outcome(method, directory)
    return {"reached": reached, "differing": [key for key in expected if expected[key] != found[key]]}


RECIPE = """
seed = 5
data = { name = "digits", test_share = 0.9 }
partition = { kind = "iid", clients = 6, test_limit = 60 }
model = { name = "tests.helpers.tiny:Tiny" }
method = { name = "METHOD" }
train = { rounds = 3, cohort = 3, epochs = 2, batch_size = 10, lr = 0.05 }
capacities = { levels = [1.0, 0.5], shares = [0.5, 0.5] }
run = { keep_rounds = [1, 3] }
"""
KILLS = 3


def command(method: str, directory: Path) -> dict[str, object]:
    """Kill `fedfactor run` again and again, resume it, and return how it differs from one that was never stopped."""
    directory.mkdir()
    recipe, whole, killed = directory / "tiny.toml", directory / "whole", directory / "killed"
    recipe.write_text(RECIPE.replace("METHOD", method))

    def run_in(out: Path) -> Callable[[], None]:
        def typed() -> None:
            sys.argv = ["fedfactor", "run", str(recipe), "--out", str(out), "--resume", "--quiet"]
            cli.main()

        return typed

    run_recipe(resolve(read(recipe)))  # what this process has imported, its children need not
    start = time.monotonic()
    codes = [in_child(run_in(whole))]
    duration, drawn, landed = time.monotonic() - start, random.Random(method), 0
    for number in range(KILLS):
        child = start_child(run_in(killed))
        if number == 0:  # surely in the middle
            while not (killed / "checkpoint" / "current").exists() and os.waitpid(child, os.WNOHANG) == (0, 0):
                time.sleep(0.001)
        else:
            time.sleep(drawn.uniform(0, duration / 4))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        landed += not (killed / "summary.json").exists()
    codes.append(in_child(run_in(killed)))
    found = {place: left_behind(place) for place in (whole, killed)}
    differing = [key for key in found[whole] if found[whole][key] != found[killed].get(key)]
    return {"codes": codes, "landed": landed, "kept": load(killed).kept, "differing": differing}


def left_behind(directory: Path) -> dict[str, object]:
    """What a run left that does not depend on the clock."""
    summary = json.loads((directory / "summary.json").read_text())
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kept = {str(path.relative_to(directory)): path for path in (directory / "kept").rglob("*") if path.is_file()}
    return {
        **{name: path.read_bytes() for name, path in kept.items()},
        "summary": {key: value for key, value in summary.items() if key != "seconds"},
        "metrics": [{key: value for key, value in event.items() if "seconds" not in key} for event in events],
        "files": sorted(kept),
    }


def main(how: str, methods: str, directory: str) -> None:
    """Dispatch the two uses above."""
    torch.set_num_threads(1)
    do = {"command": command, "exit": exit_everywhere}[how]
    print(json.dumps({name: do(name, Path(directory) / name) for name in methods.split(",")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
