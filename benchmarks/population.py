"""A thousand against a million clients: seconds per round and peak memory, each run in a process of its own.

Then the store alone: a million clients, 1,000 rounds of 100 with private state.
"""

from __future__ import annotations

import itertools
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import emit, note
from fedfactor.server.store import DiskStore

REPEATS, ROUNDS, WARMUP = 5, 40, 10


class Net(nn.Module):
    """A shared layer and a private head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(784, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.body(x.flatten(1)).relu())
        return out


def run() -> None:
    seconds: dict[int, list[float]] = {1_000: [], 1_000_000: []}
    memory: dict[int, list[float]] = {1_000: [], 1_000_000: []}
    for _ in range(REPEATS):
        for clients in seconds:  # in turn, so that the machine's mood falls on both
            command = [sys.executable, "-m", "benchmarks.population", str(clients)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            seconds[clients].append(found["seconds"])
            memory[clients].append(found["megabytes"])
            note(f"{clients:,} clients: {1e3 * found['seconds']:.2f} ms per round, {found['megabytes']:.0f} MB")
    few, many = ({"s": statistics.median(seconds[n]), "MB": statistics.median(memory[n])} for n in seconds)
    emit("population_million_over_thousand_seconds", many["s"] / few["s"], "ratio", "<= 1.10")
    emit("population_million_minus_thousand_memory", many["MB"] - few["MB"], "MB", "<= 100")
    measure_store()


def measure_store(rounds: int = 1_000, cohort: int = 100) -> None:
    """Measure commits, the opening and the index of a store whose clients are drawn from a million."""
    rng, commits = random.Random(0), []
    with tempfile.TemporaryDirectory() as directory:
        store = DiskStore(Path(directory))
        for version in range(rounds):
            for client in rng.sample(range(1_000_000), cohort):
                store.stage(version, "client", client, version.to_bytes(4) * 500)
            start = time.perf_counter()
            store.commit(version, [bytes(100_000)], {"round": version})
            commits.append(time.perf_counter() - start)
        start = time.perf_counter()
        DiskStore(Path(directory))
        emit("population_store_seconds_to_open", time.perf_counter() - start, "s", "<= 2")
        tracemalloc.start()
        again = DiskStore(Path(directory))
        note(f"{len(again.clients('client')):,} clients have a state")
        emit("population_store_index", tracemalloc.get_traced_memory()[0] / 1e6, "MB", "<= 200")
        tracemalloc.stop()
    emit("population_store_milliseconds_per_commit", 1e3 * statistics.median(commits), "ms", "<= 50")


def child(clients: int) -> None:
    """Run one federation with private state a client, committed to disk, and print what it took."""
    import fedfactor
    from fedfactor.data.clients import FederatedData, Virtual

    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(60_000, 1, 28, 28, generator=rng), torch.randint(10, (60_000,), generator=rng)
    data = FederatedData((inputs, labels), Virtual(clients, lambda client: (torch.arange(60) + 60 * client) % 60_000))
    marks = [time.perf_counter()]

    def after(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as directory:
        fedfactor.simulate(
            Net, data, method="fedper", rounds=WARMUP + ROUNDS, cohort=10, batch_size=10, evaluate_every=0,
            evaluate_clients="none", directory=directory, on_event=after,
        )  # fmt: skip
    taken = [after - before for before, after in itertools.pairwise(marks)][-ROUNDS:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps({"seconds": statistics.median(taken), "megabytes": peak}))


if __name__ == "__main__":
    child(int(sys.argv[1]))
