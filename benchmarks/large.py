"""A round of a large model, a transformer of 100 million random weights, 8 clients, on the pool and on flower-local.

Memory is the peak resident set of the process that runs the federation (`VmHWM`), Python and torch included (some 270
MB), over the bytes of the model's tensors. Workers and nodes are other processes. The pool's messages are in shared
memory: while this process writes or reads them they are part of its resident set. A job that waits for its worker, or a
reply that has not been read, is not: `shared_MB` is the most that all of them took. A commit (encoding, hashing,
writing, waiting for the disk) is compared with writing the same bytes to a file and waiting for the disk, in turn.

`python -m benchmarks.large pool` measures one engine; `LARGE_LAYERS` changes the number of layers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from benchmarks.harness import emit, note

ENGINES = ("pool", "flower-local")
CLIENTS, WORKERS, WRITES = 8, 2, 5
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
            emit("large/commit over writing as many bytes", found["commit_s"] / found["write_s"], "ratio", "")


def measured(engine: str) -> dict[str, float]:
    """Run one round and return what it took."""
    from fedfactor.runs.recipe import resolve

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
    recipe, shared = resolve(tables, "benchmarks"), _shared_memory()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        work = _pool if engine == "pool" else _flower
        memory, most_shared = _watched(lambda: work(recipe, directory), None if engine == "pool" else "flwr-serverapp")
        events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        (round,) = (event for event in events if event["event"] == "round")
        assert not round["failures"], round["failures"]
        found = {"memory_MB": memory, "shared_MB": most_shared - shared, "round_s": round["seconds"]}
        return found | _committed(directory, Path(folder) / "plain")


def _pool(recipe: Any, directory: Path) -> None:
    from fedfactor.engines import Pool
    from fedfactor.runs import execute

    with Pool(WORKERS) as pool:
        execute.run(recipe, directory, engine=pool)


def _flower(recipe: Any, directory: Path) -> None:
    from fedfactor.runs.flower.local import run_local

    run_local(recipe, directory)


def _committed(directory: Path, plain: Path) -> dict[str, float]:
    """Return the bytes of the checkpoint, and the seconds of committing it and of writing a file of the same bytes."""
    from fedfactor.server.state import Server
    from fedfactor.server.store import DiskStore, read_checkpoint
    from fedfactor.support.files import write_file

    data, info = read_checkpoint(directory / "checkpoint") or (b"", {})
    server, store, times = (
        Server.from_bytes(data, info),
        DiskStore(directory / "checkpoint"),
        list[tuple[float, float]](),
    )
    for version in range(2, 2 + WRITES):
        start = time.perf_counter()
        store.commit(version, server.to_parts(), info)
        between = time.perf_counter()
        write_file(plain, data)
        times.append((between - start, time.perf_counter() - between))
        plain.unlink()
    commit, write = map(statistics.median, zip(*times, strict=True))
    return {"model_MB": len(data) / 1e6, "commit_s": commit, "write_s": write}


def _watched(work: Callable[[], None], name: str | None) -> tuple[float, float]:
    """Do something; return the peak memory of this process, or of its descendant of that name, and of shared memory.

    In MB.
    """
    peaks, stop = [(0.0, 0.0)], threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            me = psutil.Process()
            for one in [me] if name is None else me.children(recursive=True):
                try:
                    if name is None or any(Path(word).name == name for word in one.cmdline()[:3]):
                        status = Path(f"/proc/{one.pid}/status").read_text()
                        peaks.append((int(status.partition("VmHWM:")[2].split()[0]) * 1.024e-3, _shared_memory()))
                except (psutil.NoSuchProcess, OSError, IndexError):
                    continue  # it has ended

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        stop.set()
        watcher.join()
    memory, shared = map(max, zip(*peaks, strict=True))
    return memory, shared


def _shared_memory() -> float:
    return int(Path("/proc/meminfo").read_text().partition("Shmem:")[2].split()[0]) * 1.024e-3


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measured(sys.argv[1]))) if len(sys.argv) > 1 else run()
