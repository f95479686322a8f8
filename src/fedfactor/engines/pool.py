"""Clients in worker processes: one a core, one torch thread each, the same bits as in one process.

Workers come from a fork server that has torch loaded, so that a new one is there in a moment. Each has a pipe of its
own: a process that is killed cannot take a shared lock with it. Large tensors of the task are mapped, not copied, and
so are messages: through the pipe go only their sizes. Jobs are made and laid out ahead, one a worker, in the order
given, and an answer is read while its worker is busy with the next job, so that no worker waits for this process. A
worker that dies is replaced and its job done again; a job that has killed three workers is given up.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import perf_counter
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from fedfactor import profile
from fedfactor.client.work import work
from fedfactor.protocol.engine import Done, Job
from fedfactor.protocol.message import Bytes, Parcel, Room
from fedfactor.protocol.setup import Setup

LIVES = 3
"""Workers that a job may kill before it counts as failed."""
MAPPED = 1 << 20
"""Tensors of more bytes than this are mapped into the workers."""


class Letters:
    """Memory that two processes map: one writes bytes there, the other reads them in place."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("r+b", buffering=0)  # noqa: SIM115
        self._map: Any = b""
        self._room: memoryview | None = None

    def room(self, size: int) -> memoryview:
        """Return the place of the first part, to write it there and then to give it to `write`."""
        self._room = self._places([size], grow=True)[0]
        assert self._room is not None
        return self._room

    def write(self, *parts: Parcel | Bytes | None) -> list[int]:
        """Put parts in and return their sizes, which the reader has to be told."""
        sizes = [-1 if part is None else len(part) for part in parts]
        for place, part in zip(self._places(sizes, grow=True), parts, strict=True):
            if isinstance(part, Parcel):
                part.write(place)
            elif place is not None and part is not None and part is not self._room:
                place[:] = part
        return sizes

    def read(self, sizes: list[int]) -> list[memoryview | None]:
        """Return where the parts are; they stay as they are until the writer writes again."""
        return self._places(sizes)

    def _places(self, sizes: list[int], *, grow: bool = False) -> list[memoryview | None]:
        needed = sum(map(_padded, sizes))
        if needed > len(self._map):
            if grow:
                self._file.truncate(needed + needed // 4)
            self._map = mmap.mmap(self._file.fileno(), 0)
        whole, found, position = memoryview(self._map), list[memoryview | None](), 0
        for size in sizes:
            found.append(None if size < 0 else whole[position : position + size])
            position += _padded(size)
        return found

    def close(self) -> None:
        """Let go of the file; what was read stays readable."""
        self._file.close()


def _padded(size: int) -> int:
    """Round up to whole cache lines: tensors within a part must not straddle their own size."""
    return -(-max(size, 0) // 64) * 64


def _unheld() -> int:
    """Count the references to a buffer that only a list and a loop over it know: versions of Python differ."""
    return next(sys.getrefcount(buffer) for buffer in [bytearray()])


UNHELD = _unheld()


class Shelf:
    """Memory for replies that is used again when nobody holds them any more: new memory must be zeroed first."""

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []

    def copy(self, data: memoryview) -> memoryview:
        """Return a copy that can be written to."""
        size = len(data)
        for buffer in self._buffers:
            if size <= len(buffer) <= 2 * size and sys.getrefcount(buffer) == UNHELD:
                break
        else:
            buffer = bytearray(size + size // 8)
            self._buffers.append(buffer)
        found = memoryview(buffer)[:size]
        found[:] = data
        return found


@dataclass
class Laid:
    """A job whose message lies ready where every worker can read it."""

    job: Job
    place: int
    sizes: list[int]


@dataclass
class Answer:
    """What a worker wrote, where it wrote it; it stays there until the worker's answer after the next."""

    reply: memoryview | None
    state: memoryview | None
    failure: str

    def copied(self, shelf: Shelf) -> tuple[Bytes | None, Bytes | None]:
        """Return reply and new state in memory of our own."""
        reply, state = self.reply, self.state
        return None if reply is None else shelf.copy(reply), None if state is None else bytes(state)


class Unstarted(RuntimeError):
    """No worker process can do this task."""


@dataclass
class Worker:
    """One process and the job it is busy with."""

    number: int
    process: BaseProcess
    pipe: Connection
    ups: list[Letters]
    """It answers to these in turn: one is read while it writes to the other."""
    shared: list[Any]
    """What keeps the letters' memory alive."""
    busy: Laid | None = None
    started: float = 0.0

    def __post_init__(self) -> None:
        self._turns = cycle(self.ups)

    def give(self, laid: Laid) -> None:
        """Have it do a job; raises `OSError` if it is dead."""
        self.busy, self.started = laid, perf_counter()
        self.pipe.send((laid.place, laid.sizes, profile.current() is not None))

    def answer(self) -> Answer:
        """Return what it wrote; raises `EOFError` or `OSError` if it is dead, `Unstarted` if it never lived."""
        sizes, failure, track = self.pipe.recv()
        if sizes is None:
            raise Unstarted(
                f"a worker process cannot read the task: {failure}. Data and model have to survive being copied to "
                "another process; the inline engine does without"
            )
        if track is not None and (recorder := profile.current()) is not None:
            recorder.absorb(self.number, track)
        reply, state = next(self._turns).read(sizes)
        return Answer(reply, state, failure)

    def dismiss(self) -> None:
        """Close everything that leads to the process; it ends when its pipe does."""
        for end in (self.pipe, *self.ups, *self.shared):
            end.close()


@dataclass
class Pool:
    """Runs the jobs of a run in worker processes, which stay until `close`."""

    workers: int = 0
    """How many; 0: one a core."""
    _crew: list[Worker] = field(default_factory=list)
    _setup: Setup | None = None
    _payload: bytes = b""
    _shared: list[Any] = field(default_factory=list)
    _downs: list[Letters] = field(default_factory=list)
    _paths: list[str] = field(default_factory=list)
    _blank: list[int] = field(default_factory=list)
    """Which of the letters to the workers nobody needs any more."""
    _shelf: Shelf = field(default_factory=Shelf)

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"a pool has at least one worker (0: one a core), got {self.workers}")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Yield one result a job, as they come."""
        if any(worker.busy for worker in self._crew):  # an earlier round was given up half way
            self.close()
        self._prepare(setup)
        self._blank = list(range(len(self._downs)))
        coming, ready = iter(jobs), deque[Laid]()
        deaths: dict[int, int] = {}
        while True:
            for worker in self._crew:
                if worker.busy is None and (ready or self._lay(coming, ready)):
                    self._give(worker, ready.popleft())
            busy = {worker.pipe: worker for worker in self._crew if worker.busy is not None}
            if not busy:
                return
            while len(ready) < len(self._crew) and self._lay(coming, ready):  # made while the workers are busy
                pass
            with profile.span("waiting"):
                answered = wait(list(busy))
            for pipe in answered:
                worker = busy[pipe]  # type: ignore[index]
                laid = worker.busy
                assert laid is not None
                try:
                    answer = worker.answer()
                except (EOFError, OSError):
                    self._replace(worker)
                    client = laid.job.client
                    deaths[client] = deaths.get(client, 0) + 1
                    if deaths[client] < LIVES:
                        ready.appendleft(laid)
                    else:
                        self._blank.append(laid.place)
                        yield Done(client, None, failure=f"killed {LIVES} worker processes")
                    continue
                seconds, worker.busy = perf_counter() - worker.started, None
                if ready:
                    self._give(worker, ready.popleft())
                self._blank.append(laid.place)
                yield Done(laid.job.client, *answer.copied(self._shelf), answer.failure, seconds)

    def _give(self, worker: Worker, laid: Laid) -> None:
        """Give a job to a worker, or to its successor: the death of an idle one is not the client's doing."""
        try:
            worker.give(laid)
        except OSError:
            self._replace(worker)
            with contextlib.suppress(OSError):  # found out, and mended, when we wait for it
                self._crew[worker.number].give(laid)

    def _lay(self, coming: Iterator[Job], ready: deque[Laid]) -> bool:
        """Lay out the next job, if there is one, for whichever worker is free first; tell whether there was."""
        for job in islice(coming, 1):
            place = self._blank.pop()
            ready.append(Laid(job, place, self._downs[place].write(job.parcel, job.state)))
            return True
        return False

    def close(self) -> None:
        """End the workers."""
        for worker in self._crew:
            worker.dismiss()
        for worker in self._crew:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._crew.clear()
        for handle in (*self._downs, *self._shared):
            handle.close()
        for kept in (self._downs, self._paths, self._shared):
            kept.clear()
        self._shelf = Shelf()
        self._setup = None

    def _prepare(self, setup: Setup) -> None:
        if self._setup is setup and self._crew:
            return
        self.close()
        self._setup = setup
        # Without the networks it has built: every worker builds its own, from the same seed.
        fresh = Setup(setup.task, setup.method, setup.optimizer, setup.codec, setup.training)
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self._shared).dump(fresh)
        except Exception as error:
            raise Unstarted(
                f"the task cannot be sent to worker processes: {type(error).__name__}: {error}. Data and model have to "
                "survive pickling; the inline engine does without"
            ) from error
        self._payload = buffer.getvalue()
        workers = self.workers or _cores()
        self._paths = [share(self._shared) for _ in range(2 * workers)]  # what each is busy with, and its next
        self._downs = [Letters(path) for path in self._paths]
        self._crew = [self._hire(number) for number in range(workers)]

    def _hire(self, number: int) -> Worker:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fedfactor.engines.pool"])
        ours, theirs = context.Pipe()
        shared: list[Any] = []
        ups = [share(shared), share(shared)]
        process = context.Process(target=_serve, args=(theirs, self._payload, self._paths, ups), daemon=True)
        with _without_main():
            process.start()
        theirs.close()
        return Worker(number, process, ours, [Letters(path) for path in ups], shared)

    def _replace(self, worker: Worker) -> None:
        worker.dismiss()
        worker.process.kill()
        worker.process.join()
        self._crew[worker.number] = self._hire(worker.number)


def _serve(pipe: Connection, payload: bytes, downs: list[str], ups: list[str]) -> None:
    """Be a worker: do jobs until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which may want this round's answers
    torch.set_num_threads(1)
    _keep_freed_memory()
    try:
        setup: Setup = cloudpickle.loads(payload)  # written by our own parent process; messages are never unpickled
    except Exception as error:
        pipe.send((None, f"{type(error).__name__}: {error}", None))
        return
    jobs, turns = [Letters(path) for path in downs], cycle([Letters(path) for path in ups])
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            place, sizes, recorded = pipe.recv()
            answers = next(turns)
            with profile.recording() if recorded else contextlib.nullcontext() as recorder:
                reply, new, failure = _done(setup, jobs[place].read(sizes), answers.room)
            track = None if recorder is None else recorder.mine
            pipe.send((answers.write(reply, new), failure, track))


def _done(setup: Setup, job: list[memoryview | None], room: Room) -> tuple[Bytes | None, Bytes | None, str]:
    message, state = job
    assert message is not None
    try:
        return *work(setup, message, state, room), ""
    except Exception as error:  # a client's failure costs its own update only
        return None, None, f"{type(error).__name__}: {error}"


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next step, which needs as much again, where it knows how to.

    By default it gives large blocks back to the system, which fills new ones with zeros, page by page.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Their numbers in glibc's malloc.h."""


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
        """Write a tensor where other processes can map it."""
        raw = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        path = share(self._kept)
        self._kept[-1].write(raw)
        self._kept[-1].flush()
        return path


def share(kept: list[Any]) -> str:
    """Make a file that other processes can map: memory without a name, or else a temporary file.

    It lives as long as its handle, which is put into `kept`.
    """
    if hasattr(os, "memfd_create"):
        kept.append(os.fdopen(os.memfd_create("fedfactor"), "wb"))
        return f"/proc/{os.getpid()}/fd/{kept[-1].fileno()}"
    kept.append(tempfile.NamedTemporaryFile("wb"))  # noqa: SIM115
    return str(kept[-1].name)


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
