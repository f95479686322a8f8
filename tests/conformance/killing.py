"""Runs that are killed: a process of its own that ends itself, or is ended, and starts again until the run is done.

`python -m tests.conformance.killing exit METHOD DIR` ends a forked child at every point of every commit in turn.
`python -m tests.conformance.killing run METHOD DIR` runs once, announcing every commit, to be killed from outside.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from fedfactor import store
from tests.conformance.tiny import run

ROUNDS = 3
POINTS = ("before", "states", "pointer")


def ending_at(point: str, commit: int) -> None:
    """Make this process end itself at a point of its n-th commit."""
    done = [0]
    original, replace = store.DiskStore.commit, Path.replace

    def end(here: str) -> None:
        if here == point and done[0] == commit:
            os._exit(9)

    def commit_and_end(self, version, states, server, info):  # type: ignore[no-untyped-def]
        end("before")
        original(self, version, states, server, info)
        done[0] += 1

    def replace_and_end(*paths):  # type: ignore[no-untyped-def]
        end("states")
        replace(*paths)
        end("pointer")

    store.DiskStore.commit = commit_and_end  # type: ignore[method-assign]
    Path.replace = replace_and_end  # type: ignore[method-assign,assignment]


def in_child(work: object) -> int:
    """Run a function in a forked child and return its exit code."""
    child = os.fork()
    if child == 0:
        work()  # type: ignore[operator]
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(method: str, directory: Path | None, **settings: object) -> dict[str, object]:
    """What a finished run is compared by."""
    result = run(method, rounds=ROUNDS, directory=directory, **settings)
    events = [{k: v for k, v in event.items() if "seconds" not in k} for event in result.history]
    summary = result.summary
    return {"weights": summary["weights_sha256"], "private": summary["private_sha256"], "events": events}


def exit_everywhere(method: str, directory: Path) -> None:
    """End a run at every point of every commit, resume it, and print how many ends landed and whether all agree."""
    expected, landed, differing = outcome(method, None), 0, []
    for commit in range(ROUNDS + 1):
        for point in POINTS:
            here = directory / f"{commit}-{point}"

            def killed(here: Path = here, point: str = point, commit: int = commit) -> None:
                ending_at(point, commit)
                outcome(method, here)

            landed += in_child(killed) == 9
            if outcome(method, here) != expected:
                differing.append(f"{commit}-{point}")
    print(json.dumps({"landed": landed, "differing": differing}))


def main(how: str, method: str, directory: str) -> None:
    """Dispatch the two uses above."""
    torch.set_num_threads(1)
    if how == "exit":
        exit_everywhere(method, Path(directory))
        return
    original = store.DiskStore.commit

    def announcing(self, version, states, server, info):  # type: ignore[no-untyped-def]
        original(self, version, states, server, info)
        print(f"committed {version}", flush=True)

    store.DiskStore.commit = announcing  # type: ignore[method-assign]
    print(json.dumps(outcome(method, Path(directory))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
