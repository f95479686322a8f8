"""A complete Flower deployment on this machine for one run: SuperLink, nodes and keys.

All files are in `flower/` below the run directory, which is removed at the end; nothing listens to other machines. If
the run fails, Flower's logs are kept in `flower-logs/`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedfactor.engines.flower.certificates import Certificates, node_key, server_certificates
from fedfactor.engines.flower.control import Control, NoAnswer
from fedfactor.engines.flower.programs import (
    START,
    DeploymentError,
    Program,
    RestartingProgram,
    free_port,
    node_command,
    stop_all,
    superlink_command,
    until,
)
from fedfactor.engines.flower.warm import WORKER, socket_folder
from fedfactor.runs.directory import check_claim, committed, locked
from fedfactor.runs.recipe import Recipe

MOST_NODES = 50
"""Largest number of clients: each has a SuperNode, which is two processes of about 130 MB."""
POLL = 0.5
"""Seconds between two checks of a run."""


def start_worker(socket: Path, home: Path, log: Path) -> RestartingProgram:
    """Start the process that works for nodes and stays loaded between their messages."""
    command = [sys.executable, "-P", "-m", "fedfactor.runs.flower.worker", str(socket)]
    return RestartingProgram("the worker", lambda: command, home, log)


class Deployment:
    """A SuperLink and its nodes on 127.0.0.1; with `simulation`, Flower simulates the nodes.

    The nodes share one worker process per core.
    """

    def __init__(self, home: Path, *, simulation: bool = False, database: bool = False) -> None:
        self.home, self.simulation = home, simulation
        self.logs = home / "logs"
        self.database = home / "state.db" if database else None
        self.nodes: dict[str, RestartingProgram] = {}
        self.workers: list[RestartingProgram] = []
        self.sockets: Path | None = None
        self.port = 0
        self.superlink: Program | None = None
        self.certificates: Certificates | None = None
        self._control: Control | None = None
        self._extra: dict[str, str] = {}

    def __enter__(self) -> Deployment:
        shutil.rmtree(self.home, ignore_errors=True)  # left by a run that was killed
        self.home.mkdir(parents=True, mode=0o700)
        try:
            if self.simulation:
                # Ray's sockets need a short path. Simulated nodes keep their states where real nodes do.
                ray = tempfile.mkdtemp(prefix="ray-")
                self._extra = {"RAY_TMPDIR": ray, "XDG_STATE_HOME": str(self.home.parent / "nodes")}
            else:
                self.certificates = server_certificates(self.home / "certificates", ["localhost", "127.0.0.1"], 30)
            self.start_superlink()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all programs and remove all files."""
        restarting = [*self.nodes.values(), *self.workers]
        for each in restarting:
            each.stop_restarting()
        running = [each.program for each in restarting if each.program is not None]
        stop_all([*running, *([self.superlink] if self.superlink else [])])
        if self._control is not None:
            self._control.__exit__()
            self._control = None
        for folder in (self.home, self._extra.get("RAY_TMPDIR"), self.sockets):
            if folder is not None:
                shutil.rmtree(folder)

    @property
    def address(self) -> str:
        """Address of the SuperLink."""
        return f"127.0.0.1:{self.port}"

    @property
    def control(self) -> Control:
        """A connection to the SuperLink."""
        if self._control is None:
            self._control = Control(self.address, self.certificates.authority if self.certificates else None)
        return self._control

    def start_superlink(self) -> None:
        """Start the SuperLink and wait until it answers."""
        self.port = self.port or free_port()
        command = superlink_command("127.0.0.1", self.port, self.certificates)
        command += ["--database", str(self.database)] if self.database else []
        command += ["--simulation"] if self.simulation else []
        home, log = self.home / "superlink", self.logs / "superlink.log"
        self.superlink = Program("the SuperLink", command, home, log, self._extra)
        until(self.control.answers, START, "waiting for the SuperLink", [self.superlink])

    def register(self, name: str) -> Path:
        """Create a key for a node and register it; return the path of the key."""
        key = self.home / "keys" / name
        self.control.register(node_key(key), name)
        return key

    def join(self, name: str, config: Mapping[str, str | int | float], key: Path | None = None) -> RestartingProgram:
        """Start a node; `poll` restarts it when it ends."""
        assert self.certificates is not None
        worker = {WORKER: str(self._worker(len(self.nodes) % (os.cpu_count() or 1)))}
        address, authority, proof = self.address, self.certificates.authority, key or self.register(name)
        home = self.home / "nodes" / name
        self.nodes[name] = RestartingProgram(
            f"node {name}",
            lambda: node_command(address, authority, proof, free_port(), config, home),
            home,
            self.logs / f"node-{name}.log",
            worker,
        )
        return self.nodes[name]

    def _worker(self, number: int) -> Path:
        """Return the socket of a worker, which is started first if it is missing."""
        self.sockets = self.sockets or socket_folder()
        socket = self.sockets / f"worker-{number}"
        if number == len(self.workers):
            self.workers.append(start_worker(socket, self.home / socket.name, self.logs / f"{socket.name}.log"))
        return socket

    def poll(self) -> None:
        """Restart nodes and workers that have ended."""
        for each in [*self.nodes.values(), *self.workers]:
            each.poll()


def run_local(
    recipe: Recipe,
    directory: Path,
    *,
    resume: bool = False,
    simulation: bool = False,
    data_dir: Path | None = None,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    config: Mapping[str, str | int | float | bool] | None = None,
) -> dict[str, Any]:
    """Run a recipe on a deployment of its own, or with Flower's simulation; return the content of `summary.json`."""
    from fedfactor.runs.flower.app import write_app
    from fedfactor.runs.tasks import task_of

    if simulation and importlib.util.find_spec("ray") is None:
        raise DeploymentError("--engine flower-ray needs Ray: pip install 'flwr[simulation]>=1.41,<1.42'")
    # If clients are the natural owners of the data, their number is known only from the data.
    clients = recipe.tables["partition"].get("clients") or task_of(recipe, data_dir)[0].data.clients
    if clients > MOST_NODES and not simulation:
        raise DeploymentError(
            f"--engine flower-local starts one SuperNode per client, at most {MOST_NODES}; the recipe has {clients}. "
            "Use fewer clients (--set partition.clients=8), or --engine flower-ray or pool"
        )
    directory = directory.absolute()
    with locked(directory, "flower.lock"), stopping_on_sigterm():
        check_claim(recipe, directory, resume)
        logs = directory / "flower-logs"
        shutil.rmtree(logs, ignore_errors=True)  # of an earlier attempt
        given: dict[str, str | int | float | bool] = {"data-dir": str(data_dir or ""), **(config or {})}
        try:
            with Deployment(directory / "flower", simulation=simulation) as deployment:
                app = write_app(recipe, deployment.home / "app", directory, config=given)
                try:
                    gpus = (
                        1.0 if recipe.training.device.startswith("cuda") else 0.0
                    )  # with 0, Ray hides the GPU from the nodes
                    run = deployment.control.start(app, {}, nodes=clients if simulation else 0, gpus=gpus)
                    for client in range(0 if simulation else clients):
                        deployment.join(str(client), {"client": client, "state-dir": str(directory / "nodes")})
                    _watch(deployment, run, directory, on_event)
                except Exception:
                    shutil.copytree(deployment.logs, logs)
                    raise
        except DeploymentError as error:
            log = logs / "superlink.log"
            said = f" (log: {log}; the nodes' logs are beside it)" if log.exists() else ""
            raise DeploymentError(f"{error}{said}") from None
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return found


def _watch(deployment: Deployment, run: int, directory: Path, on_event: Callable[[dict[str, Any]], None]) -> None:
    """Report events as the ServerApp writes them and restart nodes that end, until the run has ended."""
    events = Events(directory)
    while True:
        superlink = deployment.superlink
        assert superlink is not None
        if superlink.code is not None:
            raise DeploymentError(f"the SuperLink ended with exit code {superlink.code}: {superlink.log_tail()}")
        deployment.poll()
        try:
            progress = deployment.control.progress(run)
        except NoAnswer:
            time.sleep(POLL)
            continue
        for event in events.new():
            on_event(event)
        if progress.finished:
            break
        time.sleep(POLL)
    if progress.status != "finished:completed" or not (directory / "summary.json").exists():
        raise DeploymentError(f"the run ended as {progress.status}: {progress.details or superlink.log_tail()}")


class Events:
    """Events that another process commits to a run directory, as a run in this process would report them."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._round, self._seen = directory, -1, 0
        past = list(self.new())
        self._first = [{"event": "resumed", "round": self._round, "past": past[:-1]}] if past else []

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the events of all commits since the last call, each followed by a `committed` event."""
        if self._seen:
            yield from self._first
            self._first = []
        now = committed(self._directory)
        if now == self._round:
            return
        try:
            info = json.loads((self._directory / "checkpoint" / f"round-{now}" / "info.json").read_text())
        except FileNotFoundError:
            return  # replaced by a later commit, which the next call reads
        lines = (self._directory / "metrics.jsonl").read_text().splitlines()[self._seen : info["events"]]
        self._round, self._seen = now, info["events"]
        yield from (json.loads(line) for line in lines)
        yield {"event": "committed", "round": now}


@contextlib.contextmanager
def stopping_on_sigterm() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that all programs are stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
