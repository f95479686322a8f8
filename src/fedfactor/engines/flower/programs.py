"""Flower's programs as processes of ours: what they inherit, where they write, why they ended."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedfactor.engines.flower.adapter import QUIET
from fedfactor.engines.flower.certificates import Certificates

START = 120.0
"""Seconds that a program may take to come up on a busy machine."""


class DeploymentError(RuntimeError):
    """Flower's programs could not be brought up, or ended too early; the message says which and why."""


def environment(home: Path) -> dict[str, str]:
    """Return what Flower's programs inherit: they keep their files in `home` and import what this process can."""
    scripts = str(Path(sys.executable).parent)
    here = [str(Path(entry or ".").resolve()) for entry in sys.path if not entry.endswith(".zip")]
    local = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), "127.0.0.1", "localhost"]))
    return {
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
        raise DeploymentError(f"the command {name} is not installed; pip install 'fedfactor[flower]' brings it")
    return found


def free_port() -> int:
    """Return a port of this machine's own address that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


def superlink_command(host: str, port: int, certificates: Certificates | None) -> list[str]:
    """Return the command that starts a SuperLink: with certificates for nodes with known keys, else without TLS."""
    here = Path(__file__).with_name("superlink.py")
    command = [sys.executable, str(here), "--host", host, "--port", str(port)]
    command += ["--disable-runtime-dependency-installation"]
    if certificates is None:
        return [*command, "--insecure"]
    command += ["--ssl-ca-certfile", str(certificates.authority), "--ssl-certfile", str(certificates.certificate)]
    return [*command, "--ssl-keyfile", str(certificates.key), "--enable-supernode-auth"]


def node_command(
    address: str, authority: Path, key: Path, port: int, config: Mapping[str, str | int | float]
) -> list[str]:
    """Return the command that starts a SuperNode; `port` is for its own processes on its machine."""
    command = [script("flower-supernode"), "--superlink", address, "--root-certificates", str(authority)]
    command += ["--auth-supernode-private-key", str(key), "--host", "127.0.0.1", "--port", str(port)]
    return [*command, "--node-config", " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())]


class Program:
    """A running program with all the processes it starts; what it prints goes to a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        home: Path,
        log: Path,
        extra: Mapping[str, str] | None = None,
        *,
        leave: float = 0.0,
    ) -> None:
        """Start it; when it is to end, it has `leave` seconds to do so by itself."""
        self.name, self.log = name, log
        home.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py")), str(leave), *command],
                stdin=subprocess.PIPE,  # the keeper ends when this one does
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment(home), **(extra or {})},
                start_new_session=True,  # Ctrl-C in a terminal is for us: we take things down in order
            )

    @property
    def keeper(self) -> int:
        """The process that this one started: all others come from it."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """How the program ended; `None` while it runs."""
        return self._process.poll()

    def output(self) -> str:
        """Return everything it has printed so far."""
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float | None = None) -> int:
        """Wait for its end."""
        return self._process.wait(seconds)

    def stop(self) -> None:
        """End it with all that it started, and wait until nothing is left of it."""
        if self._process.poll() is None:
            self._process.terminate()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def last_words(self) -> str:
        """Return the end of what it printed, for an error."""
        return last_words(self.log)


def last_words(log: Path, lines: int = 5) -> str:
    """Return the end of a log in one line."""
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(said[-lines:])[-1000:]


def stop_all(programs: Sequence[Program]) -> None:
    """Stop programs, all at once."""
    for program in programs:
        if program.code is None:
            program._process.terminate()
    for program in programs:
        program.stop()


def until(ready: Callable[[], bool], seconds: float, what: str, programs: Sequence[Program] = ()) -> None:
    """Wait until a function says yes; an error if one of the programs ends first or the time is up."""
    end = time.monotonic() + seconds
    while not ready():
        for program in programs:
            if program.code is not None:
                raise DeploymentError(f"{program.name} ended while {what}: {program.last_words()}")
        if time.monotonic() > end:
            raise DeploymentError(f"{what} took more than {seconds:g} seconds")
        time.sleep(0.1)


class Supervised:
    """A program that is started again when it ends, after pauses that grow while it does not stay up.

    Flower takes a node that was killed for online for up to a minute, and refuses its key until then.
    """

    SHORTEST, LONGEST = 2.0, 30.0
    """Seconds between an end and the next start."""
    STEADY = 60.0
    """Seconds after which a program counts as up, and the next pause is the shortest again."""

    def __init__(
        self, name: str, command: Callable[[], Sequence[str]], home: Path, log: Path, *, leave: float = 0.0
    ) -> None:
        """Start it; the command is asked for every time: a port that was free may be so no more."""
        self._command, self._home, self._log, self._leave = command, home, log, leave
        self.name, self.starts, self._pause, self._due = name, 0, self.SHORTEST, 0.0
        self.program: Program | None = None
        self._started, self._retired = 0.0, False
        self.look()

    def look(self) -> None:
        """Start the program if it is not running and its pause is over; call this often."""
        now = time.monotonic()
        if self._retired or (self.program is not None and self.program.code is None):
            return
        if self.program is not None:  # it has ended
            self.program.stop()
            steady = now - self._started > self.STEADY
            self._pause = self.SHORTEST if steady else min(2 * self._pause, self.LONGEST)
            self._due, self.program = now + self._pause, None
        elif now >= self._due:
            self.program = Program(self.name, self._command(), self._home, self._log, leave=self._leave)
            self._started = now
            self.starts += 1

    def last_words(self) -> str:
        """Return the end of what it printed, whether it runs or not."""
        return last_words(self._log)

    def retire(self) -> None:
        """Start it no more."""
        self._retired = True
