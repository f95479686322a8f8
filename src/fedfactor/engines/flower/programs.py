"""Start, supervise and stop Flower's programs: their environment, their logs and why they ended."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tomli_w

from fedfactor.engines.flower.adapter import QUIET
from fedfactor.engines.flower.certificates import Certificates
from fedfactor.support.install import install_command

START = 120.0
"""Seconds that a program may take to start on a busy machine."""


TASK_POLL = 0.5
"""Seconds after which a SuperExec looks for the next message again; Flower's default is 1."""


class DeploymentError(RuntimeError):
    """One of Flower's programs could not be started, or ended too early; the message says which and why."""


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs: their files go to `home`, and they import what this process can."""
    scripts = str(Path(sys.executable).parent)
    folders = [*sys.path, "."]  # the current folder last, as for modules that recipes name
    here = [str(Path(entry or ".").resolve()) for entry in folders if not entry.endswith(".zip")]
    local = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), "127.0.0.1", "localhost"]))
    return {
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(TASK_POLL),
        **os.environ,
        **QUIET,
        "FLWR_HOME": str(home),
        "TMPDIR": str(home),
        "PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(here)),
        "NO_PROXY": local,
        "no_proxy": local,
    }


def script(name: str) -> str:
    """Return the path of one of Flower's commands."""
    found = shutil.which(name, path=environment(Path())["PATH"])
    if found is None:
        raise DeploymentError(f"the command {name} is not installed: {install_command('flower')}")
    return found


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def superlink_command(host: str, port: int, certificates: Certificates | None) -> list[str]:
    """Return the command that starts a SuperLink; with certificates it uses TLS and admits registered keys only."""
    here = Path(__file__).with_name("superlink.py")
    command = [sys.executable, str(here), "--host", host, "--port", str(port)]
    command += ["--disable-runtime-dependency-installation"]
    if certificates is None:
        return [*command, "--insecure"]
    command += ["--ssl-ca-certfile", str(certificates.authority), "--ssl-certfile", str(certificates.certificate)]
    return [*command, "--ssl-keyfile", str(certificates.key), "--enable-supernode-auth"]


def node_command(
    address: str, authority: Path, key: Path, port: int, config: Mapping[str, str | int | float], home: Path
) -> list[str]:
    """Return the command that starts a SuperNode; on `port` it serves its own processes on its machine.

    The configuration goes into a file in `home`: on the command line Flower cannot parse values with quotes.
    """
    home.mkdir(parents=True, exist_ok=True)
    (home / "node.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    command = [sys.executable, "-P", str(Path(__file__).with_name("supernode.py"))]
    command += ["--superlink", address, "--root-certificates", str(authority)]
    command += ["--auth-supernode-private-key", str(key), "--host", "127.0.0.1", "--port", str(port)]
    return [*command, "--node-config", str(home / "node.toml")]


class Program:
    """A running program and all processes it starts; its output goes to a log file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        home: Path,
        log: Path,
        extra: Mapping[str, str] | None = None,
        *,
        grace: float = 0.0,
    ) -> None:
        """Start the program; `stop` gives it `grace` seconds to end by itself before it is killed."""
        self.name, self.log = name, log
        home.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("supervisor.py")), str(grace), *command],
                stdin=subprocess.PIPE,  # closed when this process ends, which ends the supervisor
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment(home), **(extra or {})},
                start_new_session=True,  # Ctrl-C reaches this process only, which stops the programs in order
            )

    @property
    def supervisor(self) -> int:
        """Process id of the supervisor, from which all processes of the program descend."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code of the program; `None` while it runs."""
        return self._process.poll()

    def output(self) -> str:
        """Return everything the program has printed so far."""
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float | None = None) -> int:
        """Wait until the program ends and return its exit code."""
        return self._process.wait(seconds)

    def stop(self) -> None:
        """Stop the program and all processes it started, and wait until they have ended."""
        if self._process.poll() is None:
            self._process.terminate()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def log_tail(self) -> str:
        """Return the last lines of the log, for an error message."""
        return log_tail(self.log)


def log_tail(log: Path, lines: int = 5) -> str:
    """Return the last lines of a log file, joined to one line."""
    found = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(found[-lines:])[-1000:]


def stop_all(programs: Sequence[Program]) -> None:
    """Stop programs in parallel."""
    for program in programs:
        if program.code is None:
            program._process.terminate()
    for program in programs:
        program.stop()


def until(ready: Callable[[], bool], seconds: float, what: str, programs: Sequence[Program] = ()) -> None:
    """Wait until `ready()` is true.

    Raises:
        DeploymentError: One of the programs ended first, or the time is up.
    """
    end = time.monotonic() + seconds
    while not ready():
        for program in programs:
            if program.code is not None:
                raise DeploymentError(f"{program.name} ended while {what}: {program.log_tail()}")
        if time.monotonic() > end:
            raise DeploymentError(f"{what} took more than {seconds:g} seconds")
        time.sleep(0.1)


class RestartingProgram:
    """A program that is restarted when it ends, after a pause that doubles until the program stays up.

    Flower counts a killed node as online for up to a minute, and refuses its key until then.
    """

    SHORTEST, LONGEST = 2.0, 30.0
    """Seconds between the end of the program and its next start."""
    STEADY = 60.0
    """Seconds after which a program counts as up; its next pause is the shortest again."""

    def __init__(
        self,
        name: str,
        command: Callable[[], Sequence[str]],
        home: Path,
        log: Path,
        extra: Mapping[str, str] | None = None,
        *,
        grace: float = 0.0,
    ) -> None:
        """Start the program. `command` is called for each start, because a port that was free may be taken by then."""
        self._command, self._home, self.log, self._extra, self._grace = command, home, log, extra, grace
        self.name, self.starts, self._pause, self._due = name, 0, self.SHORTEST, 0.0
        self.program: Program | None = None
        self._started, self._restarts = 0.0, True
        self.poll()

    def poll(self) -> None:
        """Restart the program if it has ended and its pause is over; call this every second or so."""
        now = time.monotonic()
        if not self._restarts or (self.program is not None and self.program.code is None):
            return
        if self.program is not None:  # it has ended
            self.program.stop()
            steady = now - self._started > self.STEADY
            self._pause = self.SHORTEST if steady else min(2 * self._pause, self.LONGEST)
            self._due, self.program = now + self._pause, None
        elif now >= self._due:
            self.program = Program(self.name, self._command(), self._home, self.log, self._extra, grace=self._grace)
            self._started = now
            self.starts += 1

    def log_tail(self) -> str:
        """Return the last lines of the log, whether the program runs or not."""
        return log_tail(self.log)

    def stop_restarting(self) -> None:
        """Do not start the program again."""
        self._restarts = False
