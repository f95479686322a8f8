"""Time fedfactor, the plain loop and the peers on the same workloads and print them side by side.

Runs in fedfactor's environment; the peers in theirs, whose folder is the first argument. Workloads may follow (all).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.harness import emit, note
from benchmarks.rounds import PLAIN, seconds_a_round
from benchmarks.workloads import WORKLOADS, Workload
from fedfactor.engines import Pool

ROUNDS = {"cifar": 5, "logistic": 30}
WARMUP, REPEATS = 2, 2
TARGETS = {("cifar", "pfl"): ">= 1.6", ("cifar", "flower"): ">= 2.4", ("logistic", "flower"): ">= 10"}


def peer(command: list[str], work: Workload) -> float:
    """Run a peer's script and return its median seconds a round."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    rounds = str(1 + WARMUP + ROUNDS[work.name])
    done = subprocess.run(
        [*command, work.name, rounds],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return statistics.median(seconds[WARMUP:])


def main(environment: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    scripts = environment / "bin"
    peers = {
        "pfl": [str(scripts / "torchrun"), "--nproc-per-node", "2", "-m", "benchmarks.peers.pfl_rounds"],
        "flower": [str(scripts / "python"), "-m", "benchmarks.peers.flower_rounds"],
    }
    for name in names or WORKLOADS:
        work = WORKLOADS[name]
        found: dict[str, list[float]] = {}
        for _ in range(REPEATS):  # in turn, so that the machine's mood falls on all of them
            with Pool(2) as pool:
                ours = seconds_a_round(work, pool, ROUNDS[name], PLAIN, WARMUP)
            for who, seconds in {**ours, **{who: peer(command, work) for who, command in peers.items()}}.items():
                found.setdefault(who, []).append(seconds)
            note(f"{name}: " + ", ".join(f"{who} {1e3 * each[-1]:.1f} ms" for who, each in found.items()))
        medians = {who: statistics.median(each) for who, each in found.items()}
        for who, seconds in medians.items():
            emit(f"{name}_{who.replace(', ', '_').replace(' ', '_')}", seconds, "s a round", "none, for comparison")
        for who in peers:
            target = TARGETS.get((name, who), "none, for comparison")
            emit(f"{name}_times_faster_than_{who}", medians[who] / medians["fedfactor"], "times", target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
