"""A round of a large model, a transformer of 100 million random weights, 8 clients, on the pool and on flower-local.

Measured are the peak memory of the server's process (shared memory included) against the size of the model, and the
time of a commit against writing as many bytes to the same disk. `python -m benchmarks.large pool` measures one engine;
`LARGE_LAYERS` changes the number of layers.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import emit, note

ENGINES = ("pool", "flower-local")
CLIENTS, WORKERS = 8, 2
WIDTH, TOKENS, LENGTH, LAYERS = 768, 20_000, 16, 12


class Transformer(nn.Module):
    """A classifier of tokens: 100.4 million parameters with 12 layers."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, 0.0, batch_first=True) for _ in range(layers)
        )
        self.fc = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.fc(x.mean(1))
        return out


def sentences() -> Any:
    """Return one sentence of random tokens per client."""
    from fedfactor.data import Dataset

    rng = np.random.default_rng(0)
    texts, labels = rng.integers(0, TOKENS, (2 * CLIENTS, LENGTH)), rng.integers(0, 10, 2 * CLIENTS)
    return Dataset("sentences", (texts[:CLIENTS], labels[:CLIENTS]), (texts[CLIENTS:], labels[CLIENTS:]))


def run() -> None:
    for engine in ENGINES:
        done = subprocess.run([sys.executable, "-m", "benchmarks.large", engine], check=True, stdout=subprocess.PIPE)
        found = json.loads(done.stdout.splitlines()[-1])
        note(f"{engine}: {found}")
        emit(f"large/{engine}/memory over model", found["memory_MB"] / found["model_MB"], "ratio", "<= 6")
        emit(f"large/{engine}/seconds of the round", found["round_s"], "s", "")
        if engine == "pool":
            emit("large/commit over writing as many bytes", found["commit_s"] / found["write_s"], "ratio", "<= 1.5")


def measured(engine: str) -> dict[str, float]:
    """Run one round and return what it took."""
    from fedfactor.engines import Pool
    from fedfactor.runs import execute
    from fedfactor.runs.recipe import resolve
    from fedfactor.server.store import DiskStore
    from fedfactor.support.files import write_file

    layers = int(os.environ.get("LARGE_LAYERS", LAYERS))
    tables: dict[str, Any] = {
        "name": "large",
        "data": {"name": "benchmarks.large:sentences"},
        "partition": {"kind": "iid", "clients": CLIENTS, "test_share": 0.0},
        "model": {"name": "benchmarks.large:Transformer", "layers": layers},
        "method": {"name": "fedavg"},
        "train": {"rounds": 1, "cohort": CLIENTS, "batch_size": 1, "lr": 0.01},
        "evaluate": {"every": 0, "clients": "none"},
    }
    recipe, commits = resolve(tables, "benchmarks"), list[float]()

    def timed_commit(*arguments: Any) -> None:
        start = time.perf_counter()
        DiskStore_commit(*arguments)
        commits.append(time.perf_counter() - start)

    DiskStore_commit = DiskStore.commit
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        if engine == "pool":
            with mock.patch.object(DiskStore, "commit", timed_commit), Pool(WORKERS) as pool:
                execute.run(recipe, directory, engine=pool)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        else:
            from fedfactor.runs.flower.local import run_local

            peak = max(_peaks("flwr-serverapp", lambda: run_local(recipe, directory)))
        events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        (round,) = (event for event in events if event["event"] == "round")
        assert not round["failures"], round["failures"]
        checkpoint = (directory / "checkpoint" / "round-1" / "server.safetensors").read_bytes()
        start = time.perf_counter()
        write_file(Path(folder) / "plain", checkpoint)
        write = time.perf_counter() - start
    found = {"memory_MB": peak, "model_MB": len(checkpoint) / 1e6, "round_s": round["seconds"], "write_s": write}
    return found | ({"commit_s": commits[-1]} if commits else {})


def _peaks(name: str, work: Any) -> list[float]:
    """Do something, and return the peak memory, in MB, of each process of this name that it starts."""
    import psutil

    found: dict[int, float] = {}
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            for one in psutil.Process().children(recursive=True):
                try:
                    if any(Path(word).name == name for word in one.cmdline()[:3]):
                        status = Path(f"/proc/{one.pid}/status").read_text()
                        found[one.pid] = int(status.partition("VmHWM:")[2].split()[0]) / 1e3
                except (psutil.NoSuchProcess, OSError, IndexError):
                    continue  # it has ended

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        stop.set()
        watcher.join()
    return list(found.values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measured(sys.argv[1]))) if len(sys.argv) > 1 else run()
