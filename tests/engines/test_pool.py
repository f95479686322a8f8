"""Worker processes: the same bits as in one process, whatever happens to the workers."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedfactor import Tune
from fedfactor.engines import Done, Job, Pool
from fedfactor.engines.pool import MOST_STARTS, PreparedJob, SharedBuffer, WorkerStartError, shared_file
from fedfactor.methods import HeteroFL
from fedfactor.protocol.message import decode
from fedfactor.protocol.setup import Setup
from fedfactor.server.measure import measure_global
from tests.helpers.tiny import FAMILIES, Tiny, data, lasting, run


@pytest.mark.parametrize(("method", "workers"), [*((one, 2) for one in FAMILIES), ("pfedpara", 1), ("pfedpara", 4)])
def test_same_bits_as_inline_for_any_number_of_workers(method: str, workers: int) -> None:
    """One method per family: what a worker gets is a copy of the setup, with which the promises run every method."""
    settings = {"data": data(even=False), "evaluate_clients": "all", "cohort": 5}
    with Pool(workers) as pool:
        assert lasting(run(method, engine=pool, **settings)) == lasting(run(method, **settings))


def test_states_of_all_kinds_come_and_go() -> None:
    settings = {"optimizer": "scaffold", "codec": "topk", "rounds": 3, "cohort": 5}
    with Pool(2) as pool:
        assert lasting(run("pfedpara", engine=pool, **settings)) == lasting(run("pfedpara", **settings))


@pytest.mark.parametrize("method", ["heterofl", "fjord", "prism", "flanc", "pufferfish"])
def test_workers_measure_the_servers_model_as_one_process_does(method: str) -> None:
    """Accuracy and loss to the bit, at each capacity, with the statistics of norms that were estimated."""
    asked: list[str] = []

    class Watching(Pool):
        def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
            def noted() -> Iterator[Job]:
                for job in jobs:
                    asked.append(decode(job.message).kind)
                    yield job

            return super().run(setup, noted())

    settings = {"capacities": {1.0: 0.5, 0.5: 0.5}, "evaluate_clients": "none"}
    expected = run(method, **settings).history
    with Watching(2) as pool:
        found = run(method, engine=pool, **settings).history
    assert [event.get("global") for event in found] == [event.get("global") for event in expected]
    assert asked.count("measure") == 2 * 4 * len(expected[-1]["global"])  # two rounds, 360 examples in batches of 100


def test_a_worker_that_cannot_measure_stops_the_run_with_the_reason() -> None:
    with Pool(1) as pool:
        result = run(engine=pool, rounds=1)
        broken = result.federation.setup.network(1.0)
        broken.register_buffer("unknown", torch.zeros(1))
        with pytest.raises(RuntimeError, match=r"round 3: the server's model could not be measured: .*unknown"):
            measure_global(pool, result.federation.setup, 3, {1.0: broken})


class Watching(Pool):
    """A pool that counts the jobs that it has taken, and checks how many of them have no result yet."""

    made = done = 0
    most = 0

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        def counted() -> Iterator[Job]:
            for job in jobs:
                self.made += 1
                assert self.made - self.done <= self.most, "more jobs are prepared than there may be"
                yield job

        for answer in super().run(setup, counted()):
            self.done += 1
            yield answer


def test_jobs_are_made_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of many clients must not hold all their messages at once, unless they are small."""
    monkeypatch.setattr("fedfactor.engines.pool.SMALL_BYTES", 0)
    with Watching(2) as pool:  # its jobs, and the next one of each worker
        pool.most = 4
        run(engine=pool, rounds=1, cohort=6, evaluate_clients="none")
    assert pool.done == pool.made == 6 + 4  # four parts of the central test set


def test_shared_buffers_grow_and_are_read_in_place() -> None:
    kept: list[Any] = []
    path = shared_file(kept)
    writer, reader = SharedBuffer(path), SharedBuffer(path)
    for contents in ([[b"abc"], None], [[b"x" * 1000, b"w"], [b"yz"]], [[b""], [b"z" * 100000]], [[b"abc"], [b"de"]]):
        wanted = [None if parts is None else b"".join(parts) for parts in contents]
        sizes = writer.write(*contents)
        assert [None if view is None else bytes(view) for view in reader.read(sizes)] == wanted
        assert reader.take(sizes) == wanted
    (view,) = reader.read(writer.write([b"one"]))
    writer.write([b"two"])
    assert view == b"two"
    for end in (writer, reader, *kept):
        end.close()


def test_large_messages_are_not_prepared_ahead_and_leave_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"rounds": 2, "cohort": 6, "evaluate_clients": "none"}
    wanted = lasting(run("pfedpara", **settings))
    monkeypatch.setattr("fedfactor.engines.pool.LARGE_BYTES", 1000)
    monkeypatch.setattr("fedfactor.engines.pool.PIECE_BYTES", 5000)
    with Watching(2) as pool:
        pool.most = 2
        assert lasting(run("pfedpara", engine=pool, **settings)) == wanted
        replies = [file.fileno() for worker in pool._workers for file in worker.files]
        buffers = [*map(os.stat, pool._paths), *map(os.fstat, replies)]
    assert max(one.st_size for one in buffers) > 1000
    assert sum(one.st_blocks for one in buffers) == 0


def test_calibration_runs_in_workers_too() -> None:
    with Pool(2) as pool:
        result = run(HeteroFL(static_norm=True), engine=pool)
        assert result.history[-1]["global"] == run(HeteroFL(static_norm=True)).history[-1]["global"]


class Deadly(Tiny):
    """Kills its process as often as a file has lines left."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lines = self.path.read_text().splitlines()
        if self.training and lines and not x.is_meta:
            self.path.write_text("\n".join(lines[1:]))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


@pytest.mark.parametrize(("deaths", "failures"), [(2, 0), (3, 1)])
def test_a_dead_worker_is_replaced_and_its_job_retried(deaths: int, failures: int, tmp_path: Path) -> None:
    path = tmp_path / "deaths"
    path.write_text("")
    whole = lasting(run(model=lambda: Deadly(path), rounds=1, capacities={1.0: 1.0}))
    path.write_text("\n".join(["x"] * deaths))
    with Pool(1) as pool:
        result = run(model=lambda: Deadly(path), engine=pool, rounds=1, capacities={1.0: 1.0})
    assert result.summary["totals"]["failures"] == failures
    if failures:
        assert "killed 3 worker processes" in result.history[-1]["failures"][0]["reason"]
    else:
        assert lasting(result) == whole


def test_workers_killed_at_random_cost_nothing_but_time() -> None:
    settings = {"rounds": 8, "cohort": 6, "epochs": 4, "evaluate_clients": "none"}
    expected = lasting(run("pfedpara", **settings))
    stop, killed = threading.Event(), []

    with Pool(2) as pool:

        def kill() -> None:
            struck: list[PreparedJob] = []  # a job that loses three workers, on a slow machine, would be given up
            while not stop.wait(0.3) and len(killed) < 3:
                for worker in random.sample(pool._workers, len(pool._workers)):
                    running = list(worker.jobs)[:1]
                    if worker.process.is_alive() and all(job is not one for job in running for one in struck):
                        struck += running
                        killed.append(worker.process.pid)
                        worker.process.kill()
                        break

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            found = lasting(run("pfedpara", engine=pool, **settings))
        finally:
            stop.set()
            killer.join()
    assert killed, "no worker was killed"
    assert found == expected


def test_workers_that_die_while_they_start_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they, or the process that forks them, were killed at that moment."""
    kind = multiprocessing.get_context("forkserver").Process
    start, errors = kind.start, [BrokenPipeError(), EOFError(), ConnectionRefusedError()]

    def start_or_die(process: Any) -> None:
        if errors:
            raise errors.pop()
        start(process)

    monkeypatch.setattr(kind, "start", start_or_die)
    with Pool(1) as pool:
        found = lasting(run(engine=pool, rounds=1))
    assert not errors and found == lasting(run(rounds=1))
    errors += [BrokenPipeError()] * MOST_STARTS
    with Pool(1) as pool, pytest.raises(WorkerStartError, match="was killed while it started, 10 times"):
        run(engine=pool, rounds=1)


def test_the_death_of_the_process_that_forks_workers_costs_nothing() -> None:
    def kill(event: dict[str, Any]) -> None:
        if event["event"] == "committed" and event["round"]:
            os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
            pool._workers[0].process.kill()

    with Pool(2) as pool:
        found = lasting(run(engine=pool, rounds=3, on_event=kill))
    assert found == lasting(run(rounds=3))


SCRIPT = """
import sys, torch, fedfactor
from fedfactor.engines import Pool

class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

x = torch.randn(20000, 20, generator=torch.Generator().manual_seed(0))
with Pool(2) as pool:
    data = x, x[:, :4].argmax(1)
    result = fedfactor.simulate(lambda: Net(), data, method="fedpara", clients=10, rounds=2, engine=pool)
print(result.summary["totals"]["failures"], result.summary["rounds"], "torch._dynamo" in sys.modules)
"""


def test_a_plain_script_without_a_main_guard_works(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["0", "2", "False"], done.stderr  # importing torch's compiler takes seconds


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom fedfactor.engines import Pool\nfrom tests.helpers.tiny import run\n"
        "pool = Pool(2)\nrun(engine=pool, rounds=1)\n"
        "print(*[worker.process.pid for worker in pool._workers], flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 2, done.stderr
    for _ in range(100):
        alive = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
        if not alive:
            return
        time.sleep(0.1)
    raise AssertionError(f"workers {alive} outlived their parent")


class Cursed:
    """Travels well and cannot be unpacked."""

    def __reduce__(self) -> tuple[Any, ...]:
        return divmod, (1, 0)


def test_a_task_that_workers_cannot_read_is_named_at_once() -> None:
    cursed, lock = Cursed(), threading.Lock()
    with (
        Pool(2) as pool,
        pytest.raises(WorkerStartError, match=r"cannot read the task: ZeroDivisionError: .*inline engine"),
    ):
        run(model=lambda: (cursed, Tiny())[1], engine=pool)
    with Pool(2) as pool, pytest.raises(WorkerStartError, match=r"cannot be sent .* cannot pickle '_thread.lock'"):
        run(model=lambda: (lock, Tiny())[1], engine=pool)


def test_large_data_are_mapped_and_workers_build_a_model_to_train_and_one_to_measure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built = tmp_path / "built"

    def build() -> Tiny:
        with built.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return Tiny()

    monkeypatch.setattr("fedfactor.engines.pool.MAPPED_BYTES", 1000)
    with Pool(2) as pool:
        run(model=build, engine=pool, rounds=3, capacities={1.0: 1.0})
        assert len(pool._payload) < data().train[0].numel()  # whose entries take four bytes each
    workers = [pid for pid in built.read_text().split() if pid != str(os.getpid())]
    # Once to train, once to measure; on a busy machine, one worker may do all of one of them.
    assert 1 <= len(set(workers)) <= 2 and max(workers.count(pid) for pid in workers) == 2


def test_the_death_of_an_idle_worker_is_nobodys_fault() -> None:
    expected = lasting(run(rounds=3))

    def kill(event: dict[str, Any]) -> None:
        for worker in pool._workers if event["event"] == "committed" else ():
            worker.process.kill()
            worker.process.join()

    with Pool(2) as pool:
        found = run(engine=pool, rounds=3, on_event=kill)
        assert lasting(found) == expected and found.summary["totals"]["failures"] == 0


def test_workers_share_a_frozen_base() -> None:
    """Each worker has less than a tenth of a large base as memory of its own, beyond what it has with a small one."""

    def own_bytes(features: int) -> int:
        torch.manual_seed(0)
        body = [nn.Linear(features, features, bias=False) for _ in range(8)]
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, features), *body, nn.Linear(features, 10))
        found = [0]

        def watch(event: dict[str, Any]) -> None:
            if event["event"] == "answered" and event["round"] == 2:
                texts = [Path(f"/proc/{worker.process.pid}/smaps_rollup").read_text() for worker in pool._workers]
                kilobytes = [sum(map(int, re.findall(r"^Private_\w+: +(\d+)", text, re.M))) for text in texts]
                found.append(1024 * max(kilobytes))

        with Pool(2) as pool:
            tune = Tune(targets=("2", "3"), train=("10",))
            run("lora", model=model, tune=tune, capacities=None, engine=pool, on_event=watch)
        return max(found)

    assert own_bytes(1024) - own_bytes(16) < 0.1 * 4 * 8 * 1024**2
