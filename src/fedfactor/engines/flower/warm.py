"""A worker process that stays loaded between messages, and the requests to it over a private Unix socket.

Flower starts a process for each message. With a worker, that process does not import torch: it sends the message to
the worker, waits for its turn and returns the worker's answer. Both ends need no torch and no flwr.

A request and an answer are a JSON text and bytes, each preceded by its length. The socket lies in a folder that its
owner alone can open, and both ends check the user of the other one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedfactor.protocol.wire import Bytes

WORKER = "FEDFACTOR_WORKER"
"""Environment variable with the path of the worker's socket; not set for a node without a worker."""
PATIENCE = 120.0
"""Seconds to wait for a worker that is being started again."""
LOOK = 0.1
"""Seconds between two attempts to connect."""
ABANDONED = 75
"""Exit code of a worker whose client has gone while it worked: nobody waits for the answer any more."""
LONGEST_PATH = 100
"""Bytes that the path of a Unix socket may have on every system."""

_TURN = b"\x01"
_LENGTHS = struct.Struct("<Qq")
_NO_BYTES = -1

Answer = tuple[dict[str, Any], Bytes | None]
"""Fields and the bytes of an encoded message, if there is one."""


class NoWorker(RuntimeError):
    """The worker cannot be asked, or ended before it answered; the message says which."""


def socket_folder() -> Path:
    """Create a folder for the sockets of workers, which its owner alone can open; the caller removes it."""
    folder = Path(tempfile.mkdtemp(prefix="fedfactor-"))
    if len(os.fsencode(folder)) + len("/worker-999") > LONGEST_PATH:
        folder.rmdir()
        raise ValueError(f"{folder.parent} is too long for the path of a socket: set TMPDIR to a shorter folder")
    return folder


def ask(path: Path, fields: Mapping[str, Any], data: Bytes | None, patience: float = PATIENCE) -> Answer:
    """Send a request to the worker at a socket and return its answer; raise NoWorker if there is none."""
    with _connected(path, patience) as connection:
        try:
            _send(connection, fields, data)
            return _receive(connection)
        except (EOFError, OSError):
            raise NoWorker("the worker process of this node ended while it worked on this message") from None


def serve(path: Path, answer: Callable[[dict[str, Any], bytearray | None], Answer]) -> None:
    """Answer requests one after another until the process ends.

    If a client disconnects while its request is worked on, the process exits, because nobody else can end that work.
    Its supervisor starts it again.
    """
    _check_private(path.parent)
    path.unlink(missing_ok=True)  # of a worker that was killed
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(EOFError, OSError, NoWorker):  # gone, or a stranger
                _answer_one(connection, answer)


def _answer_one(connection: socket.socket, answer: Callable[[dict[str, Any], bytearray | None], Answer]) -> None:
    _check_peer(connection)
    connection.sendall(_TURN)
    fields, data = _receive(connection)
    done = threading.Event()

    def watch() -> None:
        if not connection.recv(1) and not done.is_set():
            os._exit(ABANDONED)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        answered = answer(fields, data)
    finally:
        done.set()
    try:
        _send(connection, *answered)
    finally:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RD)  # ends the watcher
        watcher.join()


def _connected(path: Path, patience: float) -> socket.socket:
    """Return a connection on which it is this client's turn; a busy worker is waited for without limit."""
    _check_private(path.parent)
    end = time.monotonic() + patience
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            _check_peer(connection)
            if connection.recv(1) == _TURN:
                return connection
            end = time.monotonic() + patience  # it was up, and ended before it was our turn
        except OSError:  # it is being started
            pass
        except BaseException:
            connection.close()
            raise
        connection.close()
        if time.monotonic() > end:
            raise NoWorker(f"the worker process of this node did not start within {patience:g} seconds: see its log")
        time.sleep(LOOK)


def _check_private(folder: Path) -> None:
    """Raise NoWorker unless a folder belongs to this user and nobody else can open it."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise NoWorker(f"{folder} must be a folder that belongs to this user and that others cannot open (mode 0700)")


def _check_peer(connection: socket.socket) -> None:
    """Raise NoWorker unless the other end is a process of this user; other systems than Linux rely on the folder."""
    if hasattr(socket, "SO_PEERCRED"):
        form = struct.Struct("3i")
        _, user, _ = form.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size))
        if user != os.geteuid():
            raise NoWorker(f"the other end of the worker's socket belongs to user {user}")


def _send(connection: socket.socket, fields: Mapping[str, Any], data: Bytes | None) -> None:
    text = json.dumps(fields).encode()
    connection.sendall(_LENGTHS.pack(len(text), _NO_BYTES if data is None else len(data)) + text)
    if data is not None:
        connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], bytearray | None]:
    text, data = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
    fields: dict[str, Any] = json.loads(_read(connection, text))
    return fields, None if data == _NO_BYTES else _read(connection, data)


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return data
