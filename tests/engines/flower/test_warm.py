"""Requests to a worker: over a private socket, one after another, and what happens when one of the two ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fedfactor.engines.flower import warm
from fedfactor.engines.flower.warm import ABANDONED, NoWorker, ask, serve, socket_folder

WORKER = """
import os, sys, time
from pathlib import Path
from fedfactor.engines.flower.warm import serve

def answer(fields, data):
    if fields.get("die"):
        os._exit(9)
    time.sleep(fields.get("sleep", 0))
    return {"pid": os.getpid(), **fields}, None if data is None else data[::-1]

serve(Path(sys.argv[1]), answer)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A socket in a folder of mode 0700."""
    (tmp_path / "s").mkdir(mode=0o700)
    return tmp_path / "s" / "worker"


def start(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WORKER, str(path)])


def test_requests_are_answered_one_after_another_and_a_dead_worker_is_named(path: Path) -> None:
    with start(path) as worker:
        large = os.urandom(3_000_001)
        assert ask(path, {"a": 1.5, "b": "ü"}, large) == ({"pid": worker.pid, "a": 1.5, "b": "ü"}, large[::-1])
        assert ask(path, {}, None) == ({"pid": worker.pid}, None)
        assert ask(path, {}, b"") == ({"pid": worker.pid}, b"")
        answers = list[Any]()
        threads = [
            threading.Thread(target=lambda n=n: answers.append(ask(path, {"n": n, "sleep": 0.05}, None)))
            for n in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(fields["n"] for fields, _ in answers) == list(range(5))
        with pytest.raises(NoWorker, match="ended while it worked on this message"):
            ask(path, {"die": True}, None)
        assert worker.wait(30) == 9
    with pytest.raises(NoWorker, match=r"did not start within 0\.2 seconds"):
        ask(path, {}, None, patience=0.2)
    with start(path) as worker:  # it replaces the socket that the dead one left
        assert ask(path, {}, None)[0]["pid"] == worker.pid
        worker.kill()


def test_a_request_that_waits_for_its_turn_survives_the_worker(path: Path) -> None:
    with start(path) as first:
        ask(path, {}, None)
        busy = socket.socket(socket.AF_UNIX)
        busy.connect(str(path))
        assert busy.recv(1)
        found = list[Any]()
        waiting = threading.Thread(target=lambda: found.append(ask(path, {"x": 1}, b"ab")))
        waiting.start()
        time.sleep(0.1)
        first.kill()
    with start(path) as second:
        waiting.join(30)
        assert found == [({"pid": second.pid, "x": 1}, b"ba")]
        second.kill()
    busy.close()


def test_a_worker_ends_with_the_client_it_works_for(path: Path) -> None:
    with start(path) as worker:
        ask(path, {}, None)
        client = warm._connected(path, 1)
        warm._send(client, {"sleep": 60}, None)
        time.sleep(0.1)
        client.close()
        assert worker.wait(10) == ABANDONED
    with start(path) as worker:  # one that goes before it has sent all costs nothing
        ask(path, {}, None)
        client = warm._connected(path, 1)
        client.sendall(b"half")
        client.close()
        assert ask(path, {}, None)[0]["pid"] == worker.pid
        worker.kill()


def test_a_socket_that_others_could_open_or_serve_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in (0o755, 0o710, 0o701):
        path.parent.chmod(mode)
        for use in (lambda: ask(path, {}, None, 0), lambda: serve(path, lambda *_: ({}, None))):
            with pytest.raises(NoWorker, match="mode 0700"):
                use()
    path.parent.chmod(0o700)
    link = path.parent.parent / "link"
    link.symlink_to(path.parent)
    with pytest.raises(NoWorker, match="must be a folder that belongs to this user"):
        ask(link / "worker", {}, None, 0)
    with start(path) as worker:
        ask(path, {}, None)
        user = os.geteuid()
        peer = warm._check_peer
        monkeypatch.setattr(warm.os, "geteuid", lambda: user + 1)
        with pytest.raises(NoWorker, match=f"belongs to user {user}"):
            monkeypatch.setattr(warm, "_check_private", lambda folder: None)
            ask(path, {}, None)
        monkeypatch.undo()
        assert warm._check_peer is peer
        worker.kill()


def test_the_folder_of_sockets_is_private_and_its_path_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = socket_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(ValueError, match="set TMPDIR to a shorter folder"):
        socket_folder()
    assert not list(long.iterdir())
