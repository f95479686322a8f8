"""Engine that runs clients in worker processes, with the same bits as in one process.

There is one worker per core, with one torch thread each. Workers are forked from a server process that has imported
torch, so they start quickly. Each has a pipe of its own, so a killed worker cannot hold a shared lock. Messages and the
large tensors of the task are in shared memory; only their sizes go through the pipes. One job per worker is prepared
ahead, and a reply is copied while its worker runs the next job, so that workers do not wait for this process; a small
job is also sent ahead. Large jobs are not prepared ahead, and no memory of large messages is kept. A worker that dies
is replaced and its job is run again; a job that has killed three workers counts as failed.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import perf_counter, sleep
from types import ModuleType
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

from fedfactor import profile
from fedfactor.client.work import work
from fedfactor.protocol.engine import Done, Job
from fedfactor.protocol.message import Bytes
from fedfactor.protocol.setup import Setup

MOST_KILLED = 3
"""Number of workers that a job may kill before it counts as failed."""
SMALL_BYTES = 1 << 20
"""Jobs of this size or less are sent to a worker while it runs another one: its next one must not wait for us."""
LARGE_BYTES = 64 << 20
"""Messages larger than this take as little memory as possible, although workers then wait while one is prepared."""
PIECE_BYTES = 16 << 20
"""How much of a large message is copied before the memory of the original is given back to the system."""
MAPPED_BYTES = 1 << 16
"""Tensors larger than this are shared with the workers instead of copied. A transformer has many below a megabyte."""
MOST_STARTS = 10
"""Number of attempts to start a worker. One fails if the worker, or the process that forks it, is killed meanwhile."""
PRELOADED = [__name__]
"""Modules that are imported once for all workers, before they are forked."""


class SharedBuffer:
    """Memory that two processes map: one writes messages, the other reads them in place.

    Sending messages through pipes instead takes 4 % more processor time (CIFAR workload of `benchmarks/rounds.py`).
    """

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("r+b", buffering=0)  # noqa: SIM115
        self._map: Any = b""

    def write(self, *contents: Sequence[Bytes] | None) -> list[int]:
        """Write contents, each in parts, and return their sizes, which the reader needs; -1 stands for `None`."""
        sizes = [-1 if parts is None else sum(map(len, parts)) for parts in contents]
        needed = sum(map(_padded, sizes))
        if needed > len(self._map):
            self._file.truncate(needed + needed // 4)
        for place, parts in zip(self.read(sizes), contents, strict=True):
            position = 0
            for part in parts or ():
                assert place is not None
                place[position : position + len(part)] = part
                position += len(part)
        if len(self._map) > LARGE_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)  # it counts as memory of the process that reads it
        return sizes

    def take(self, sizes: list[int]) -> list[bytearray | None]:
        """Return copies of the contents. The memory of large ones is given back to the system as they are copied."""
        found, position = list[bytearray | None](), 0
        for view in self.read(sizes):
            copied = None if view is None else bytearray()
            for start in range(0, len(view or b""), PIECE_BYTES):
                self.empty(position + start)
                copied += view[start : start + PIECE_BYTES]  # type: ignore[operator, index]
            found.append(copied)
            position += _padded(len(view or b""))
        self.empty()
        return found

    def empty(self, end: int | None = None) -> None:
        """Give the memory of large contents, up to a position, back to the system; zeros are left."""
        if len(self._map) > LARGE_BYTES and hasattr(mmap, "MADV_REMOVE"):
            length = len(self._map) if end is None else end // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_REMOVE, 0, length)

    def read(self, sizes: list[int]) -> list[memoryview | None]:
        """Return views of the contents; they are valid until the writer writes again."""
        if sum(map(_padded, sizes)) > len(self._map):
            self._map = mmap.mmap(self._file.fileno(), 0)
        whole, found, position = memoryview(self._map), list[memoryview | None](), 0
        for size in sizes:
            found.append(None if size < 0 else whole[position : position + size])
            position += _padded(size)
        return found

    def close(self) -> None:
        """Close the file; views that were read stay valid."""
        self._file.close()


def _done(client: int, contents: list[bytearray | None], failure: str, seconds: float) -> Done:
    """Return a result, whose reply is writable, so that decoding needs no further copy."""
    reply, state = contents
    return Done(client, reply, state, failure, seconds)


def _padded(size: int) -> int:
    """Round up to whole cache lines, so that the tensors within each part are aligned."""
    return -(-max(size, 0) // 64) * 64


class WorkerStartError(RuntimeError):
    """Worker processes cannot run this task."""


@dataclass
class PreparedJob:
    """A job whose message is in a shared buffer, where every worker can read it."""

    client: int
    buffer: int
    sizes: list[int]

    @property
    def small(self) -> bool:
        """Whether it is sent ahead."""
        return sum(self.sizes) <= SMALL_BYTES

    @property
    def large(self) -> bool:
        """Whether no other one is prepared meanwhile."""
        return sum(self.sizes) > LARGE_BYTES


@dataclass
class Worker:
    """A worker process, the job that it is running, and maybe one that was sent ahead."""

    number: int
    process: BaseProcess
    pipe: Connection
    replies: list[SharedBuffer]
    """The worker writes replies to these in turn: one is read while it writes to the other."""
    files: list[Any]
    """Open files that keep the memory of `replies` alive."""
    jobs: deque[PreparedJob] = field(default_factory=deque)
    started: float = 0.0
    """When the first of the jobs began."""

    def __post_init__(self) -> None:
        self._turns = cycle(self.replies)

    def send(self, job: PreparedJob) -> None:
        """Start a job, now or after the running one; raises `OSError` if the process is dead."""
        if not self.jobs:
            self.started = perf_counter()
        self.jobs.append(job)
        self.pipe.send((job.buffer, job.sizes, profile.current() is not None))

    def receive(self) -> tuple[Callable[[], list[bytearray | None]], str]:
        """Return the failure, and a function that returns copies of the reply and the new state.

        Call it once, before the reply after the next. Raises `EOFError` or `OSError` if the process is dead,
        `WorkerStartError` if it could not read the task.
        """
        sizes, failure, track = self.pipe.recv()
        if sizes is None:
            raise WorkerStartError(
                f"a worker process cannot read the task: {failure}. Data and model must be picklable, or use the "
                "inline engine"
            )
        if track is not None and (recorder := profile.current()) is not None:
            recorder.absorb(self.number, track)
        return partial(next(self._turns).take, sizes), failure

    def finish(self) -> tuple[PreparedJob, float]:
        """Return the job whose reply was received, and the seconds that it took; the next one has begun."""
        now, begun = perf_counter(), self.started
        self.started = now
        return self.jobs.popleft(), now - begun

    def close(self) -> None:
        """Close the pipe, which ends the process, and the files."""
        for end in (self.pipe, *self.replies, *self.files):
            end.close()


@dataclass
class Pool:
    """Engine that runs jobs in worker processes, which live until `close`."""

    shares_memory: ClassVar[bool] = True
    workers: int = 0
    """Number of workers; 0 means one per core."""
    _workers: list[Worker] = field(default_factory=list)
    _setup: Setup | None = None
    _payload: bytes = b""
    _files: list[Any] = field(default_factory=list)
    _buffers: list[SharedBuffer] = field(default_factory=list)
    """Messages to the workers."""
    _paths: list[str] = field(default_factory=list)
    _free: list[int] = field(default_factory=list)
    """Which of the buffers can be written to."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"workers must be at least 1 (or 0 for one per core), got {self.workers}")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Yield one result per job, in the order in which they finish."""
        if any(worker.jobs for worker in self._workers):  # the caller stopped in the middle of an earlier round
            self.close()
        self._start(setup)
        self._free = list(range(len(self._buffers)))
        coming, ready = iter(jobs), deque[PreparedJob]()
        killed: dict[int, int] = {}
        while True:
            for worker in self._workers:
                if not worker.jobs and (ready or self._prepare(coming, ready)):
                    self._send(worker, ready.popleft())
            busy = {worker.pipe: worker for worker in self._workers if worker.jobs}
            if not busy:
                return
            self._prepare_ahead(coming, ready)  # while the workers are busy
            with profile.span("waiting"):
                answered = wait(list(busy))
            for pipe in answered:
                worker = busy[pipe]  # type: ignore[index]
                try:
                    take, failure = worker.receive()
                except (EOFError, OSError):
                    self._replace(worker)
                    job, *others = worker.jobs
                    ready.extendleft(others)
                    killed[job.client] = killed.get(job.client, 0) + 1
                    if killed[job.client] < MOST_KILLED:
                        ready.appendleft(job)
                    else:
                        self._release(job)
                        yield Done(job.client, None, failure=f"killed {MOST_KILLED} worker processes")
                    continue
                job, seconds = worker.finish()
                if not worker.jobs and ready:
                    self._send(worker, ready.popleft())
                self._release(job)
                yield _done(job.client, take(), failure, seconds)

    def _send(self, worker: Worker, job: PreparedJob) -> None:
        """Send a job to a worker, or to its replacement: the death of an idle worker is not the client's fault."""
        try:
            worker.send(job)
        except OSError:
            self._replace(worker)
            with contextlib.suppress(OSError):  # `run` notices that it is dead, too, when it receives
                self._workers[worker.number].send(job)

    def _prepare_ahead(self, coming: Iterator[Job], ready: deque[PreparedJob]) -> None:
        """Prepare a job per worker, and send a small one to each that has no other but the running one.

        The last jobs are not sent ahead: each is for the worker that is free first. While large jobs run, nothing is
        prepared.
        """
        workers = len(self._workers)
        if any(job.large for worker in self._workers for job in worker.jobs):
            return
        while len(ready) < (2 * workers if ready and ready[0].small else workers) and self._prepare(coming, ready):
            pass
        for worker in self._workers:
            if len(worker.jobs) == 1 and len(ready) > workers and ready[0].small:
                with contextlib.suppress(OSError):  # `run` notices that it is dead when it receives
                    worker.send(ready.popleft())

    def _prepare(self, coming: Iterator[Job], ready: deque[PreparedJob]) -> bool:
        """Write the next job to a shared buffer, for the worker that is free first; return whether there was one."""
        job = next(coming, None)
        if job is None:
            return False
        buffer, state = self._free.pop(), None if job.state is None else [job.state]
        ready.append(PreparedJob(job.client, buffer, self._buffers[buffer].write(job.parts, state)))
        return True

    def _release(self, job: PreparedJob) -> None:
        """Let the buffer of a job that has ended be used for another one."""
        self._buffers[job.buffer].empty()
        self._free.append(job.buffer)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()
        for end in (*self._buffers, *self._files):
            end.close()
        for kept in (self._buffers, self._paths, self._files):
            kept.clear()
        self._setup = None

    def _start(self, setup: Setup) -> None:
        """Start the workers, unless they run with this setup already."""
        if self._setup is setup and self._workers:
            return
        self.close()
        self._setup = setup
        stream = io.BytesIO()
        try:
            # Without networks: every worker builds its own, from the same seed.
            _Pickler(stream, self._files).dump(setup.fresh())
        except Exception as error:
            raise WorkerStartError(
                f"the task cannot be sent to worker processes: {type(error).__name__}: {error}. Data and model must be "
                "picklable, or use the inline engine"
            ) from error
        self._payload = stream.getvalue()
        workers = self.workers or _cores()
        self._paths = [shared_file(self._files) for _ in range(4 * workers)]  # see `_prepare_ahead`
        self._buffers = [SharedBuffer(path) for path in self._paths]
        self._workers = [self._start_worker(number) for number in range(workers)]

    def _start_worker(self, number: int) -> Worker:
        for _ in range(MOST_STARTS):
            with contextlib.suppress(EOFError, ConnectionError):
                return self._fork(number)
            sleep(0.1)  # the killed process may take a moment to end
        raise WorkerStartError(f"a worker process was killed while it started, {MOST_STARTS} times in a row")

    def _fork(self, number: int) -> Worker:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        ours, theirs = context.Pipe()
        files: list[Any] = []
        paths = [shared_file(files), shared_file(files)]
        process = context.Process(target=_serve, args=(theirs, self._payload, self._paths, paths), daemon=True)
        # multiprocessing runs the main script again in each new process, unless the main module has no file, and has no
        # option to turn this off. Workers get all they need in the payload, so scripts work without a guard
        # `if __name__ == "__main__"`. Starting fresh interpreters instead would take 2.7 s of processor time per worker
        # to import torch; a forked worker takes 0.01 s.
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            process.start()
        except BaseException:
            for end in (ours, *files):
                end.close()
            raise
        finally:
            sys.modules["__main__"] = main
            theirs.close()
        return Worker(number, process, ours, [SharedBuffer(path) for path in paths], files)

    def _replace(self, worker: Worker) -> None:
        worker.close()
        worker.process.kill()
        worker.process.join()
        self._workers[worker.number] = self._start_worker(worker.number)


def _serve(pipe: Connection, payload: bytes, job_paths: list[str], reply_paths: list[str]) -> None:
    """Run jobs in a worker process until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which may finish the round first
    torch.set_num_threads(1)
    try:
        setup: Setup = cloudpickle.loads(payload)  # written by the parent process; messages are never unpickled
    except Exception as error:
        pipe.send((None, f"{type(error).__name__}: {error}", None))
        return
    jobs, turns = [SharedBuffer(path) for path in job_paths], cycle([SharedBuffer(path) for path in reply_paths])
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            buffer, sizes, recorded = pipe.recv()
            with profile.recording() if recorded else contextlib.nullcontext() as recorder:
                reply, state, failure = _run_job(setup, *jobs[buffer].read(sizes))
            track = None if recorder is None else recorder.mine
            contents = [None if one is None else [one] for one in (reply, state)]
            pipe.send((next(turns).write(*contents), failure, track))
            del reply, state, contents  # while it waits


def _run_job(
    setup: Setup, message: memoryview | None, state: memoryview | None
) -> tuple[Bytes | None, Bytes | None, str]:
    assert message is not None
    try:
        return *work(setup, message, state), ""
    except Exception as error:  # a failed client must not affect the others
        return None, None, f"{type(error).__name__}: {error}"


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that replaces large tensors by places in a shared file to map."""

    def __init__(self, stream: io.BytesIO, files: list[Any]) -> None:
        super().__init__(stream)
        self._path, self._file = shared_file(files), files[-1]
        self._offsets: dict[tuple[int, torch.dtype, torch.Size, tuple[int, ...]], int] = {}

    def reducer_override(self, thing: Any) -> Any:
        # A parameter is pickled as a call with its plain tensor, which is mapped.
        plain = isinstance(thing, Tensor) and not isinstance(thing, nn.Parameter)
        if not plain or thing.nbytes <= MAPPED_BYTES or thing.device.type != "cpu":
            return super().reducer_override(thing)
        key = thing.data_ptr(), thing.dtype, thing.shape, thing.stride()
        if key not in self._offsets:  # the tensors of a frozen base belong to several models
            self._offsets[key] = self._file.seek(-(-self._file.tell() // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._file.write(memoryview(thing.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
            self._file.flush()
        shape, dtype = tuple(thing.shape), str(thing.dtype).removeprefix("torch.")
        return _map_tensor, (self._path, self._offsets[key], thing.nbytes, dtype, shape)


def shared_file(files: list[Any]) -> str:
    """Create a file that other processes can map, in memory if possible, and return its path.

    The file exists until its handle, which is appended to `files`, is closed.
    """
    if hasattr(os, "memfd_create"):
        files.append(os.fdopen(os.memfd_create("fedfactor"), "wb"))
        return f"/proc/{os.getpid()}/fd/{files[-1].fileno()}"
    files.append(tempfile.NamedTemporaryFile("wb"))  # noqa: SIM115
    return str(files[-1].name)


def _map_tensor(path: str, offset: int, size: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Map a tensor; processes share its memory as long as none of them writes to it."""
    raw = np.memmap(Path(path), mode="c", dtype=np.uint8, offset=offset, shape=(size,))
    return torch.from_numpy(raw).view(getattr(torch, dtype)).view(shape)
