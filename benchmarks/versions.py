"""Processor time of a round against another checkout of this repository, in turn: is this version slower?

`python -m benchmarks.versions PATH [WORKLOAD ...]` compares with the checkout in PATH (`git worktree add PATH COMMIT`).
Each version runs a federation in a process of its own and stops after every few rounds, so that the two alternate. Each
pair has new processes: one process can be five per cent slower than another one of the same program.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import emit, note
from benchmarks.workloads import WORKLOADS
from fedfactor import simulate
from fedfactor.data.clients import FederatedData

PAIRS = 9
ROUNDS = {"logistic": 5, "cifar": 1}
"""Rounds before the other version has its turn: about 0.2 s, less than the machine's speed takes to change."""
TURNS = {"logistic": 12, "cifar": 2}
"""Turns of each version per pair."""


class _Version:
    """A federation of one checkout that trains a few rounds when asked."""

    def __init__(self, checkout: Path, workload: str) -> None:
        env = os.environ | {"PYTHONPATH": f"{checkout / 'src'}:{Path(__file__).parents[1]}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.versions", "--child", workload]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.turn()  # the first one warms up

    def turn(self) -> float:
        """Train a few rounds; return the seconds of processor time they took."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def _child(workload: str) -> None:
    """Train a few rounds at a time; wait for a line before them, and print their seconds after them."""
    work = WORKLOADS[workload]
    data = FederatedData(work.data(), [work.rows(client) for client in range(work.users)])
    begin = [0.0]

    def after(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] % ROUNDS[workload] == 0:
            print(time.process_time() - begin[0], flush=True)
            sys.stdin.readline()
            begin[0] = time.process_time()

    sys.stdin.readline()
    simulate(
        work.build, data, on_event=after, rounds=(TURNS[workload] + 2) * ROUNDS[workload], cohort=work.cohort,
        batch_size=work.batch, lr=work.lr, evaluate_every=0, evaluate_clients="none",
    )  # fmt: skip


def compare(other: Path, workloads: list[str]) -> None:
    """Print, per workload, the median ratio of processor time over the other version's, and of that one over itself."""
    here = Path(__file__).parents[1]
    for workload in workloads or ROUNDS:
        times = []
        for _ in range(PAIRS):
            versions = [_Version(path, workload) for path in (here, other, other)]
            turns = [[version.turn() for version in versions] for _ in range(TURNS[workload])]
            times.append([sum(column) for column in zip(*turns, strict=True)])
            for version in versions:
                version.process.kill()
        for name, pair in ((workload, (0, 1)), (f"{workload}, noise: the other version over itself", (2, 1))):
            ratios = sorted(row[pair[0]] / row[pair[1]] for row in times)
            note(f"{name}: " + " ".join(f"{ratio:.3f}" for ratio in ratios))
            emit(name, statistics.median(ratios), "of the other version's processor time", "<= 1.02")


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        _child(sys.argv[2])
    else:
        compare(Path(sys.argv[1]).resolve(), sys.argv[2:])
