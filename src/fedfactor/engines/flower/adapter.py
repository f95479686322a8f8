"""All that this package knows of flwr: what it imports, how a message is packed, and what is switched off.

flwr changes often, so it is pinned, nothing else imports it but `control.py` and `superlink.py`, which start runs, and
each thing it is relied on for has a test that fails first (`tests/engines/flower/test_canaries.py`, `test_control.py`).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedfactor.protocol.message import BadMessage, Bytes

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment of every process of ours that runs Flower: it reports to nobody and installs nothing."""

for name, value in QUIET.items():
    os.environ.setdefault(name, value)  # before flwr is imported, which reads them then

try:
    import httpx
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:  # pragma: no cover
    raise ImportError(f"Flower is not installed ({error}): pip install 'fedfactor[flower]'") from error

__all__ = [
    "QUIET",
    "Answer",
    "ClientApp",
    "Context",
    "Grid",
    "Inbox",
    "Message",
    "Node",
    "RecordDict",
    "ServerApp",
    "instruction",
    "nodes",
    "pack",
    "push",
    "unpack",
]

Plain = bool | int | float | str
"""What a field may be."""
STORED_AS = "fedfactor"
"""The serialisation type of our arrays: the bytes are a message of ours and not numpy's."""


def pack(data: Bytes | None, fields: Mapping[str, Plain]) -> RecordDict:
    """Return the content of a message: plain fields and one array of bytes, whatever the number of tensors.

    Flower moves every array by a request of its own, at some 580 bytes each.
    """
    content = RecordDict({"fields": ConfigRecord(dict(fields))})
    if data is not None:
        content["bytes"] = ArrayRecord({"message": Array("uint8", (len(data),), STORED_AS, bytes(data))})
    return content


def unpack(content: RecordDict) -> tuple[bytes | None, dict[str, Any]]:
    """Read what `pack` wrote, or whatever somebody else did: raises `BadMessage`."""
    if not isinstance(content, RecordDict):
        raise BadMessage("a message of another app: its content is no dictionary of records")
    fields, arrays = content.get("fields"), content.get("bytes")
    if not isinstance(fields, ConfigRecord) or not set(content) <= {"fields", "bytes"}:
        raise BadMessage("a message of another app: it lacks the record of fields, or has others")
    if arrays is None:
        return None, dict(fields)
    if not isinstance(arrays, ArrayRecord) or set(arrays) != {"message"}:
        raise BadMessage("a message of another app: it should hold one array, called message")
    array = arrays["message"]
    if array.dtype != "uint8" or array.stype != STORED_AS:
        raise BadMessage(f"a message of another app: its array is {array.dtype} stored as {array.stype[:40]!r}")
    return array.data, dict(fields)


@dataclass(frozen=True)
class Node:
    """A connected node: the number Flower gives it, unsigned and of 64 bits, and who it is by its key."""

    id: int
    key: str
    """SHA-256 of the public key that the SuperLink knows it by; empty where there is none."""


def nodes(grid: Grid) -> list[Node]:
    """Return the nodes that are connected now, in the order of their numbers."""
    found = []
    for info in grid.get_nodes():
        key = bytes(info.public_key)
        found.append(Node(int(info.node_id), hashlib.sha256(key).hexdigest() if key else ""))
    return sorted(found, key=lambda node: node.id)


def instruction(content: RecordDict, node: int, kind: str, ttl: float) -> Message:
    """Return a message to a node; it is forgotten after `ttl` seconds.

    Its number is a hash of it, and whoever knows the number could answer in the node's place: with something random in
    it nobody can guess that.
    """
    content.config_records["fields"]["once"] = secrets.token_hex(16)
    return Message(content, node, kind, ttl=ttl)


def push(grid: Grid, message: Message) -> str | None:
    """Send one message and return its number; `None` if the SuperLink did not take it."""
    numbers = [number for number in grid.push_messages([message]) if number]
    return numbers[0] if numbers else None


@dataclass(frozen=True)
class Answer:
    """What came back for a message: its content, or Flower's word for what went wrong."""

    to: str
    """The number of the message that is answered."""
    node: int
    """The sender, in its own words; meaningless in errors."""
    content: RecordDict | None
    error: str = ""


class Inbox:
    """Pulls answers one message at a time, so that whatever a node sends concerns its own message alone.

    Flower puts an answer together within a pull: it waits there until all parts have come, for minutes where a node is
    slow or means harm, and raises what is wrong with them. A pull of several messages would lose the others. What an
    answer says of itself, its sender wrote; which message it answers, the SuperLink knows, who is asked for that one.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, _Pull] = {}

    def pull(self, grid: Grid, numbers: Iterable[str]) -> list[Answer]:
        """Return what has come back so far for these messages; a pull that takes long is left to itself."""
        found = []
        for number in numbers:
            pulling = self._under_way.pop(number, None) or _Pull(grid, number)
            if pulling.is_done():
                found += pulling.answers()
            else:
                self._under_way[number] = pulling
        return found


PATIENCE = 2.0
"""Seconds that a pull may take before others go on beside it."""


class _Pull:
    """One message's pull, in a thread of its own which ends with the process."""

    def __init__(self, grid: Grid, number: str) -> None:
        self._grid, self._number = grid, number
        self._found: list[Answer] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._thread.join(PATIENCE)

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def answers(self) -> list[Answer]:
        if self._error is not None:
            raise self._error
        return self._found

    def _run(self) -> None:
        try:
            self._found = [self._read(reply) for reply in self._grid.pull_messages([self._number])]
        except (httpx.HTTPError, OSError) as error:
            self._error = error  # of the connection to the SuperLink
        except Exception as error:  # of what the node sent
            reason = f"what it sent cannot be read ({type(error).__name__}: {error})"
            self._found = [Answer(self._number, 0, None, reason)]
        except BaseException as error:
            self._error = error

    def _read(self, reply: Message) -> Answer:
        meta = reply.metadata
        if reply.has_error():
            word = ERRORS.get(reply.error.code, f"error {reply.error.code}")
            reason = " ".join((reply.error.reason or "").split())
            return Answer(self._number, meta.src_node_id, None, f"{word}: {reason}".rstrip(": "))
        return Answer(self._number, meta.src_node_id, reply.content)


ERRORS = {
    1: "the app could not be loaded on the node",
    2: "the app failed on the node",
    3: "the message expired, or was lost",
    4: "the reply was lost",
    5: "the node was lost",
    7: "the node refused the app's bundle",
    8: "the app's process on the node ended",
}
"""Flower's error codes in words."""
