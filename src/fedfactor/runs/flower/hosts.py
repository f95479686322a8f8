"""A deployment over several machines: `up` on the server, `join` on each node.

Both start Flower's programs and restart them when they end; both can be killed and started again at any time. The files
of the server are in one folder, the site:

```
ca.crt         certificate by which nodes verify the server; copy it to each node
server.crt     the server's certificate
server.key
keys/          public keys of the nodes that may join, NAME.pub; add or remove them at any time
state.db       Flower's state
logs/          output of Flower's programs
```
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedfactor.engines.flower.certificates import (
    Certificates,
    check_authority,
    check_certificate,
    node_key,
    server_certificates,
    write_secret,
)
from fedfactor.engines.flower.control import Control, Hopeless, NoAnswer, key_bytes, unreachable, wrong_certificate
from fedfactor.engines.flower.programs import (
    DeploymentError,
    RestartingProgram,
    free_port,
    node_command,
    script,
    stop_all,
    superlink_command,
)
from fedfactor.engines.flower.warm import WORKER, socket_folder
from fedfactor.runs.directory import committed, finished, lacking
from fedfactor.runs.flower.local import POLL, Events, start_worker
from fedfactor.runs.recipe import Recipe

DAYS = 365
"""Days for which the certificates that `up` creates are valid."""
LOOK = 2.0
"""Seconds between two checks of the folder of keys."""
AGAIN = 5.0
"""Seconds between the end of a ServerApp and its next start."""
TRIES = 3
"""Starts without progress before giving up: of a run that commits no round, and of a SuperLink that never answers."""
GRACE = 10.0
"""Seconds that a node has to sign off from the server, which would otherwise count it as online for a minute."""


class Keys:
    """The folder of public keys of the nodes that may join."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._unread = set[str]()

    def admit(self, control: Control) -> list[str]:
        """Register the keys in the folder, remove all others, and return a message per change."""
        known, wanted, unread, changes = {node.key: node for node in control.nodes()}, set[bytes](), {}, []
        for path in sorted(self.folder.glob("*.pub")):
            try:
                key = key_bytes(path)
                wanted.add(key)
                if key not in known:
                    control.register(path, path.stem)
                    changes.append(f"{path.stem} may join")
            except NoAnswer:
                raise
            except DeploymentError as error:  # not a key; perhaps the file is still being copied
                unread[path.stem] = str(error)
        changes += [reason for reason in unread.values() if reason not in self._unread]
        self._unread = set(unread.values())
        for key, node in known.items():
            if key not in wanted and node.name not in unread:
                control.unregister(node.id)
                changes.append(f"{node.name} may no longer join")
        return changes


class Site:
    """The server's folder, its SuperLink and its SuperExec, the process that starts ServerApps.

    SuperLink and SuperExec are separate processes because a ServerApp started by the SuperLink itself ends with it,
    whereas one started by the SuperExec waits until the SuperLink is up again.
    """

    def __init__(self, folder: Path, hosts: list[str], listen: str, port: int) -> None:
        self.folder, self.port = folder.absolute(), port
        self.keys = Keys(self.folder / "keys")
        self.keys.folder.mkdir(parents=True, exist_ok=True)
        self.certificates = self._certificates(hosts)
        secret = self.folder / "superexec.secret"
        if not secret.exists():
            write_secret(secret, secrets.token_bytes(32))
        command = [*superlink_command(listen, port, self.certificates), "--database", str(self.folder / "state.db")]
        command += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
        executor = [script("flower-superexec"), "--runtime-api-address", f"127.0.0.1:{port}"]
        executor += ["--root-certificates", str(self.certificates.authority)]
        executor += ["--superexec-auth-secret-file", str(secret)]
        home, logs = self.folder / "flower", self.folder / "logs"
        self.superlink = RestartingProgram("the SuperLink", lambda: command, home / "superlink", logs / "superlink.log")
        self.executor = RestartingProgram("the SuperExec", lambda: executor, home / "superexec", logs / "serverapp.log")
        self.control = Control(f"127.0.0.1:{port}", self.certificates.authority)

    def _certificates(self, hosts: list[str]) -> Certificates:
        found = Certificates(self.folder / "ca.crt", self.folder / "server.crt", self.folder / "server.key")
        if found.key.exists():
            check_certificate(found.certificate, hosts)
            return found
        return server_certificates(self.folder, [*hosts, "localhost", "127.0.0.1"], DAYS)

    def poll(self) -> None:
        """Restart programs that have ended."""
        self.superlink.poll()
        self.executor.poll()

    def close(self) -> None:
        """Stop all programs; the folder stays."""
        for one in (self.superlink, self.executor):
            one.stop_restarting()
        stop_all([one.program for one in (self.superlink, self.executor) if one.program is not None])
        self.control.__exit__()


def up(
    recipe: Recipe,
    directory: Path,
    site: Site,
    *,
    config: Mapping[str, str | int | float | bool],
    on_event: Callable[[dict[str, Any]], None],
    tell: Callable[[str], None],
) -> None:
    """Serve a run until it has finished; restart the ServerApp or SuperLink if it ends, which resumes the run."""
    from fedfactor.runs.flower.app import write_app

    events, app = Events(directory), write_app(recipe, site.folder / "app", directory, config=config)
    if finished(recipe, directory) is None:
        (directory / "summary.json").unlink(missing_ok=True)  # of a finished run that is now extended
    looked, attempt = 0.0, Attempts(directory)
    run: int | None = None
    answered, told, summary = False, "", directory / "summary.json"
    done = summary.exists() and not lacking(directory)
    while not done:
        ended = site.superlink.program is not None and site.superlink.program.code is not None
        if ended and not answered and site.superlink.starts >= TRIES:
            raise DeploymentError(f"the SuperLink does not start: {site.superlink.log_tail()}")
        site.poll()
        try:
            if time.monotonic() - looked > LOOK:
                changes = site.keys.admit(site.control)
                looked, answered, told = time.monotonic(), True, ""
                for change in changes:
                    tell(change)
            if run is None:
                run = site.control.start(app, {})
                attempt.count()
            progress = site.control.progress(run)
            for event in events.new():
                on_event(event)
            if progress.finished:
                run, done = None, summary.exists()
                if not done:
                    attempt.reason = progress.details or progress.status
                    tell(f"the ServerApp ended ({attempt.reason}); restarting it")
                    time.sleep(AGAIN)
        except NoAnswer as error:  # it is down or still starting; `site.poll` restarts it
            if answered and str(error) != told:
                told = str(error)
                tell(f"{told}; waiting for it")
            time.sleep(1.0)
        time.sleep(POLL)
    if missed := lacking(directory):
        tell(
            f"the run is finished, but these clients did not receive the last model: {', '.join(map(str, missed))}. "
            "Start their nodes, then run the same command again"
        )


class Attempts:
    """Counts the starts of a run that makes no progress."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._round, self._tries = directory, -2, 0
        self.reason = ""

    def count(self) -> None:
        """Count a start; raise RunFailed after too many without a new committed round."""
        now = committed(self._directory)
        self._tries, self._round = (self._tries + 1 if now == self._round else 1), now
        if self._tries > TRIES:
            raise RunFailed(f"the run ended {TRIES} times without getting beyond round {max(now, 0)}: {self.reason}")


class RunFailed(RuntimeError):
    """A run makes no progress although its ServerApp was restarted several times."""


def join(
    address: str,
    authority: Path,
    key: Path,
    home: Path,
    config: Mapping[str, str | int | float],
    tell: Callable[[str], None],
) -> None:
    """Run a node until interrupted. Report when it connects, why it cannot, and when it receives the last model."""
    check_authority(authority)
    if not key.exists():
        public = node_key(key)
        tell(f"created a key for this node: copy {public} to the folder keys of the server's site")
    log, state = GrowingFile(home / "node.log"), Path(str(config["state-dir"]))
    received = kept_models(state)
    tell(f"connecting to {address}; the log of this node is {log.path}")
    sockets = socket_folder()
    worker = start_worker(sockets / "worker", home, home / "worker.log")
    node = RestartingProgram(
        "this node",
        lambda: node_command(address, authority.absolute(), key.absolute(), free_port(), config, home),
        home,
        log.path,
        {WORKER: str(sockets / "worker")},
        grace=GRACE,
    )
    said, told, looked, ever, connected = "", "", -PROBE, False, False
    try:
        while True:
            ended = node.program is not None and node.program.code is not None
            said = (said + log.new())[-MOST_OUTPUT:]
            if CONNECTED in said and not connected:
                ever = connected = True
                tell(f"connected to {address}")
            if ended:
                tell(f"{refusal(said, address, key)}; trying again (log: {log.path})")
                said, connected = "", False
            if time.monotonic() - looked >= PROBE:
                reason, looked = unreachable(address, authority), time.monotonic()
                if isinstance(reason, Hopeless) and not ever:
                    raise DeploymentError(reason)
                if reason != told:
                    tell(f"{reason}; trying again" if reason else f"the server at {address} answers")
                told = reason
                before, received = received, kept_models(state)
                for folder in [folder for folder in received if received[folder] != before.get(folder)]:
                    tell(f"received the last model; to export it: fedfactor export {folder} -o model.safetensors")
            if worker.program is not None and worker.program.code is not None:
                tell(f"the worker ended with exit code {worker.program.code}; starting it again (log: {worker.log})")
            node.poll()
            worker.poll()
            time.sleep(POLL)
    finally:
        for each in (node, worker):
            each.stop_restarting()
        stop_all([each.program for each in (node, worker) if each.program is not None])
        shutil.rmtree(sockets)


def kept_models(state: Path) -> dict[Path, int]:
    """Return the folders below a node's state folder that have the last model of a run, and when they were written."""
    return {path.parents[1]: path.stat().st_mtime_ns for path in state.glob("*/client-*/checkpoint/current")}


CONNECTED = "SuperNode ID:"
"""What a SuperNode writes to its log when the server has accepted it."""
PROBE = 5.0
"""Seconds between two checks of whether the server answers."""
MOST_OUTPUT = 20_000
"""Characters of a node's last output in which reasons are looked for."""


class GrowingFile:
    """A file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = path.stat().st_size if path.exists() else 0

    def new(self) -> str:
        """Return what was appended since the last call."""
        if not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        return data.decode(errors="replace")


def refusal(said: str, address: str, key: Path) -> str:
    """Return why a SuperNode ended, judging by its output."""
    if reason := wrong_certificate(said, address):
        return reason
    if "[code: 2004]" in said or "Failed to activate SuperNode" in said:
        return (
            f"the server at {address} does not accept this node's key: either {key.name}.pub is not in the folder keys "
            "of its site, or a node with this key has just ended and counts as online for up to a minute"
        )
    if "401" in said and "Unauthorized" in said:
        return f"the server at {address} rejected the signature's timestamp: check that both clocks agree"
    last = [line.strip() for line in said.splitlines() if line.strip()]
    return f"the node ended: {' | '.join(last[-3:])[-500:]}"
