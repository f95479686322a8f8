"""The worker of a node: the same bits as without it, no torch in Flower's processes, and memory that stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedfactor.engines.flower.adapter import unpack
from fedfactor.engines.flower.programs import RestartingProgram
from fedfactor.engines.flower.warm import WORKER, ask, serve
from fedfactor.runs.execute import run
from fedfactor.runs.flower.device import setup_on_node
from fedfactor.runs.flower.local import start_worker
from fedfactor.runs.flower.worker import Worker
from tests.helpers.grid import Deployment, kind_of, outcome, recipe

JOBS = int(os.environ.get("WORKER_JOBS", "30"))
"""How many jobs a worker does while its memory is watched."""
GROWTH = 4 << 20
"""Bytes by which it may grow meanwhile: noise of the allocator. One copy of the tiny model per job would be more."""


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The socket of a worker in a thread of this process, to which ClientApps turn."""
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    threading.Thread(target=serve, args=(folder / "worker", Worker().answer), daemon=True).start()
    monkeypatch.setenv(WORKER, str(folder / "worker"))
    yield folder / "worker"


def test_a_run_with_workers_gives_the_same_bits(socket: Path, tmp_path: Path) -> None:
    chosen = recipe("pfedpara", train={"rounds": 2, "cohort": 2}, evaluate={"every": 0})
    found = outcome(Deployment(tmp_path, chosen).serve())
    expected = outcome(run(chosen))
    assert {key: found[key] for key in expected if key != "events"} == {
        key: expected[key] for key in expected if key != "events"
    }


LIGHT = """
import json, sys
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from fedfactor.engines.flower.adapter import pack, unpack
from fedfactor.runs.flower.client_app import app
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
config = json.loads(sys.argv[1])
message = Message(pack(None, {"run": "r"}), 7, "query")
message.metadata.__dict__["_message_id"] = message.object_id
fields = unpack(app(message, Context(1, 7, {"client": 3}, RecordDict(), config)).content)[1]
print(json.dumps([fields, sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "fedfactor"))]))
"""


def test_flowers_process_imports_no_torch_if_there_is_a_worker(socket: Path, tmp_path: Path) -> None:
    config = json.dumps(Deployment(tmp_path, recipe()).config)
    done = subprocess.run([sys.executable, "-c", LIGHT, config], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fields, modules = json.loads(done.stdout)
    assert fields["client"] == 3, fields
    assert modules == [
        "fedfactor", "fedfactor.engines", "fedfactor.engines.flower", "fedfactor.engines.flower.adapter",
        "fedfactor.engines.flower.warm", "fedfactor.protocol", "fedfactor.protocol.wire", "fedfactor.runs",
        "fedfactor.runs.flower", "fedfactor.runs.flower.client_app", "fedfactor.support", "fedfactor.support.install",
        "fedfactor.support.lazy",
    ]  # fmt: skip


def test_data_are_loaded_once_per_run(tmp_path: Path) -> None:
    worker, node = Worker(), {"client": 0, "data": "digits"}
    config = Deployment(tmp_path, recipe(partition={"train_share": 1.0}), data="nodes").config

    def hello(name: str) -> int:
        asked = {"kind": "query", "fields": {"run": name}, "run": config, "node": node}
        fields, _ = worker.answer(asked, None)
        assert fields["client"] == 0, fields
        return setup_on_node.cache_info().misses

    assert [hello("a"), hello("a"), hello("b")] == [1, 1, 1], "the count starts again when they are dropped"
    assert setup_on_node.cache_info().currsize == 1


def jobs_of(folder: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Return the requests that one round makes of a worker."""
    deployed = Deployment(folder, recipe("pfedpara", train={"rounds": 1}, evaluate={"every": 0}))
    deployed.serve()
    found = []
    for message in deployed.grid.pushed:
        if kind_of(message) == "train":
            data, fields = unpack(message.content)
            node = deployed.grid.contexts[message.metadata.dst_node_id].node_config
            assert data is not None
            found.append(({"kind": "train", "fields": fields, "run": deployed.config, "node": dict(node)}, data))
    return found


def test_a_worker_does_not_grow_and_is_started_again_when_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestartingProgram, "SHORTEST", 0.1)
    jobs = jobs_of(tmp_path)
    (tmp_path / "s").mkdir(mode=0o700)
    path = tmp_path / "s" / "w"
    worker = start_worker(path, tmp_path / "home", tmp_path / "log")
    try:

        def work(number: int) -> int:
            """Do a job; return the process that did it."""
            fields, data = ask(path, *jobs[number % len(jobs)])
            assert data and "failure" not in fields, fields
            assert worker.program is not None
            (process,) = psutil.Process(worker.program.supervisor).children()
            return int(process.pid)

        for number in range(10):
            process = work(number)
        before = psutil.Process(process).memory_info().rss
        for number in range(JOBS):
            assert work(number) == process
        grown = psutil.Process(process).memory_info().rss - before
        print(f"{JOBS} jobs: {grown} bytes more than {before}")
        assert grown < GROWTH
        os.kill(process, signal.SIGKILL)
        while worker.starts < 2:
            worker.poll()
            time.sleep(0.05)
        assert work(0) != process
    finally:
        worker.stop_restarting()
        assert worker.program is not None
        worker.program.stop()
