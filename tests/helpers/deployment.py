"""What tests of deployments share: small recipes, the same run inline, and processes found by what they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedfactor.engines import Done, Inline, Job
from fedfactor.engines.flower.control import RunProgress
from fedfactor.engines.flower.programs import environment
from fedfactor.protocol.setup import Setup
from fedfactor.runs.execute import run
from fedfactor.runs.flower.local import Deployment
from fedfactor.runs.recipe import Recipe, resolve

HOSTILE, WATCHED = Path(__file__).parent / "hostile", Path(__file__).parent / "watched"
HASHES = ("weights_sha256", "private_sha256")


def recipe(method: str = "fedpara", rounds: int = 2, clients: int = 4, **tables: Any) -> Recipe:
    """A short run on digits in which all clients take part in every round."""
    given: dict[str, Any] = {
        "name": "digits",
        "seed": 5,
        "data": {"name": "digits", "test_share": 0.5},
        "partition": {"kind": "iid", "clients": clients},
        "model": {"name": "tests.helpers.tiny:Tiny"},
        "method": {"name": method},
        "train": {"rounds": rounds, "cohort": clients, "epochs": 2, "batch_size": 32, "lr": 0.05, "quorum": 0.25},
        "evaluate": {"every": rounds, "clients": "none"},
    }
    return resolve({**given, **tables}, "a test")


def inline(one: Recipe, without: Collection[int] = ()) -> dict[str, Any]:
    """Return the summary of the same run in this process, some clients never answering."""
    return run(one, engine=Missing(frozenset(without))).summary


@dataclass(frozen=True)
class Missing(Inline):
    """All clients in this process, except for some."""

    clients: frozenset[int]

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Work the other jobs off."""
        for done in super().run(setup, jobs):
            yield Done(done.client, None, failure="is missing") if done.client in self.clients else done


def events(directory: Path) -> list[dict[str, Any]]:
    """Return the rounds that a run directory has."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if event["event"] == "round"]


def finish(deployment: Deployment, run: int, seconds: float = 900) -> RunProgress:
    """Wait for the end of a run, starting nodes again that ended."""
    found = list[RunProgress]()

    def done() -> bool:
        deployment.poll()
        found[:] = [deployment.control.progress(run)]
        return found[0].finished

    wait_for(done, seconds, "the end of the run")
    assert deployment.superlink is not None
    assert found[0].status == "finished:completed", f"{found[0]}: {deployment.superlink.output()[-3000:]}"
    return found[0]


def wait_for(ready: Callable[[], Any], seconds: float, what: str) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"{what} took more than {seconds} seconds"
        time.sleep(0.5)


def process_named(name: str, of: int) -> int:
    """Return the process that runs a command of Flower's, among those that come from another."""
    commands = {one: {Path(word).name for word in words_of(one)} for one in descendants(of)}
    found = [one for one, words in commands.items() if name in words and "supervisor.py" not in words]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def processes_about(path: Path) -> list[int]:
    """Return all processes of this machine whose command line names something in a folder."""
    return [one for one in psutil.pids() if any(str(path) in word for word in words_of(one))]


def words_of(process: int) -> list[str]:
    """Return the command line of a process."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


@contextmanager
def lying(behaviour: str, seconds: float = 0) -> Iterator[None]:
    """Have the nodes that are started meanwhile lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOSTILE", behaviour)
        patch.setenv("HOSTILE_SECONDS", str(seconds))
        patch.setattr(sys, "path", [str(HOSTILE), *sys.path])
        yield


@contextmanager
def command(*words: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of fedfactor's in a process of its own."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", "from fedfactor.cli import main; main()", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": environment(Path())["PYTHONPATH"]},
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def listening(port: int) -> bool:
    """Tell whether somebody listens on a port of this machine."""
    import socket

    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def own_processes() -> set[int]:
    """Return all processes that come from this one."""
    return descendants(os.getpid())


def descendants(process: int) -> set[int]:
    """Return all processes that come from one, without those that have ended and were not waited for."""
    found = set()
    for one in psutil.Process(process).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE:
                found.add(one.pid)
    return found
