"""Clients in worker processes: one a core, one torch thread each, the same bits as in one process.

Workers come from a fork server that has torch loaded, so that a new one is there in a moment. Each has a pipe of its
own: a process that is killed cannot take a shared lock with it. Large tensors of the task are mapped, not copied. A
worker that dies is replaced and its job done again; a job that has killed three workers is given up.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import perf_counter
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from fedfactor.client import Setup, work
from fedfactor.engines.base import Done, Job

LIVES = 3
"""Workers that a job may kill before it counts as failed."""
MAPPED = 1 << 20
"""Tensors of more bytes than this are mapped into the workers."""


@dataclass
class Worker:
    """One process and the job it is busy with."""

    process: BaseProcess
    pipe: Connection
    job: Job | None = None
    started: float = 0.0


@dataclass
class Pool:
    """Runs the jobs of a run in worker processes, which stay until `close`."""

    workers: int = 0
    """How many; 0: one a core."""
    _crew: list[Worker] = field(default_factory=list)
    _setup: Setup | None = None
    _payload: bytes = b""
    _shared: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"a pool has at least one worker (0: one a core), got {self.workers}")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Yield one result a job, as they come."""
        if any(worker.job for worker in self._crew):  # an earlier round was given up half way
            self.close()
        self._prepare(setup)
        # The longest jobs first, so that none of them is left alone at the end.
        sizes = setup.task.data.train_of
        waiting = sorted(jobs, key=lambda job: len(sizes[job.client]))
        deaths: dict[int, int] = {}
        while waiting or any(worker.job for worker in self._crew):
            for worker in self._crew:
                if worker.job is None and waiting:
                    self._give(worker, waiting.pop())
            busy = {worker.pipe: worker for worker in self._crew if worker.job is not None}
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                job = worker.job
                assert job is not None
                try:
                    answer = worker.pipe.recv()
                except (EOFError, OSError):
                    self._replace(worker)
                    deaths[job.client] = deaths.get(job.client, 0) + 1
                    if deaths[job.client] < LIVES:
                        waiting.append(job)
                    else:
                        yield Done(job.client, None, failure=f"killed {LIVES} worker processes")
                    continue
                worker.job = None
                reply, state, failure = answer
                yield Done(job.client, reply, state, failure, perf_counter() - worker.started)

    def close(self) -> None:
        """End the workers."""
        for worker in self._crew:
            worker.pipe.close()  # they end when their pipe does
        for worker in self._crew:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._crew.clear()
        self._shared.clear()
        self._setup = None

    def _prepare(self, setup: Setup) -> None:
        if self._setup is setup and self._crew:
            return
        self.close()
        self._setup = setup
        # Without the networks it has built: every worker builds its own, from the same seed.
        fresh = Setup(setup.task, setup.method, setup.optimizer, setup.codec, setup.training)
        buffer = io.BytesIO()
        _Pickler(buffer, self._shared).dump(fresh)
        self._payload = buffer.getvalue()
        self._crew = [self._hire() for _ in range(self.workers or os.cpu_count() or 1)]

    def _hire(self) -> Worker:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fedfactor.engines.pool"])
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._payload), daemon=True)
        with _without_main():
            process.start()
        theirs.close()
        return Worker(process, ours)

    def _replace(self, worker: Worker) -> None:
        worker.pipe.close()
        worker.process.kill()
        worker.process.join()
        self._crew[self._crew.index(worker)] = self._hire()

    def _give(self, worker: Worker, job: Job) -> None:
        worker.job, worker.started = job, perf_counter()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # found out, and mended, when we wait for it
            worker.pipe.send((job.message, job.state))


def _serve(pipe: Connection, payload: bytes) -> None:
    """Be a worker: do jobs until the pipe ends."""
    torch.set_num_threads(1)
    setup: Setup = cloudpickle.loads(payload)  # written by our own parent process; messages are never unpickled
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            message, state = pipe.recv()
            try:
                reply, new = work(setup, message, state)
            except Exception as error:  # a client's failure costs its own update only
                pipe.send((None, None, f"{type(error).__name__}: {error}"))
            else:
                pipe.send((reply, new, ""))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles what workers need; large tensors as places to map them from."""

    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._kept = shared

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Tensor) and thing.device.type == "cpu" and thing.numel() * thing.element_size() > MAPPED:
            return _mapped, (self._place(thing), str(thing.dtype).removeprefix("torch."), tuple(thing.shape))
        return super().reducer_override(thing)

    def _place(self, tensor: Tensor) -> str:
        """Write a tensor where other processes can map it: memory without a name, or else a temporary file."""
        raw = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        if hasattr(os, "memfd_create"):
            handle: Any = os.fdopen(os.memfd_create("fedfactor"), "wb")
            path = f"/proc/{os.getpid()}/fd/{handle.fileno()}"
        else:
            handle = tempfile.NamedTemporaryFile("wb")  # noqa: SIM115
            path = handle.name
        handle.write(raw)
        handle.flush()
        self._kept.append(handle)  # lives, and with it the memory, as long as the pool
        return path


def _mapped(path: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Map a tensor; pages are shared until somebody writes to them, and nobody does."""
    raw = np.memmap(Path(path), mode="c", dtype=np.uint8)
    return torch.from_numpy(raw).view(getattr(torch, dtype)).view(shape)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep a new process from importing the main script again: what it needs of it comes with the payload."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {
        name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__
    }
    main.__dict__["__spec__"] = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)
