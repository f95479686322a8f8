"""The package's interface to flwr: its imports, how messages are packed, and which of flwr's services are turned off.

flwr changes often. Its version is therefore pinned, and only this module, `control.py` and `superlink.py` import it.
Each property of flwr that this package relies on has a test of its own (`test_canaries.py`, `test_control.py`).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from fedfactor.protocol.wire import BadMessage, Bytes

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment of every Flower process: no telemetry, no update check, no installation of packages."""

for name, value in QUIET.items():
    os.environ.setdefault(name, value)  # flwr reads them when it is imported

import httpx  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as PIECE  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402

__all__ = [
    "QUIET",
    "ClientApp",
    "ConnectedNode",
    "Context",
    "Grid",
    "Inbox",
    "Message",
    "NodeAnswer",
    "RecordDict",
    "ServerApp",
    "instruction",
    "nodes",
    "pack",
    "push",
    "unpack",
]

Plain = bool | int | float | str
"""Type of a field's value."""
STORED_AS = "fedfactor"
"""Serialisation type of the arrays: their bytes are an encoded message, not an array of numpy."""


ARRAY_PIECES = 4
"""Pieces of an array. Flower needs three times the memory of an array when it puts it together."""


def pack(data: Bytes | Sequence[Bytes] | None, fields: Mapping[str, Plain]) -> RecordDict:
    """Return the content of a message: plain fields, and the bytes, given at once or in parts, as an array.

    One array for all tensors, because Flower sends each array with a request of its own and 580 bytes of overhead. Long
    messages have several arrays.
    """
    content = RecordDict({"fields": ConfigRecord(dict(fields))})
    if data is not None:
        parts = [data] if isinstance(data, Bytes) else data
        arrays = (Array("uint8", (len(some),), STORED_AS, some) for some in _divided(parts, ARRAY_PIECES * PIECE))
        content["bytes"] = ArrayRecord(dict(zip(_array_names(), arrays, strict=False)))
    return content


def _array_names() -> Iterator[str]:
    return (f"message{number or ''}" for number in count())


def _divided(parts: Sequence[Bytes], most: int) -> Iterator[bytes]:
    """Yield the same bytes, divided such that each part has `most` of them, except the last one."""
    if sum(map(len, parts)) <= most:
        yield b"".join(parts)
        return
    collected = bytearray()
    for part in parts:
        for start in range(0, len(part), most):
            collected += part[start : start + most]
            if len(collected) >= most:
                yield bytes(memoryview(collected)[:most])
                collected = collected[most:]
    if collected:
        yield bytes(collected)


def unpack(content: RecordDict) -> tuple[Bytes | None, dict[str, Any]]:
    """Return the bytes and fields that `pack` was given; raise `BadMessage` for any other content."""
    if not isinstance(content, RecordDict):
        raise BadMessage("a message of another app: its content is not a RecordDict")
    fields, arrays = content.get("fields"), content.get("bytes")
    if not isinstance(fields, ConfigRecord) or not set(content) <= {"fields", "bytes"}:
        raise BadMessage("a message of another app: its records are not `fields` and `bytes`")
    if arrays is None:
        return None, dict(fields)
    if not isinstance(arrays, ArrayRecord) or not arrays or set(arrays) != {*islice(_array_names(), len(arrays))}:
        raise BadMessage("a message of another app: expected arrays called `message`, `message1`, ...")
    for array in arrays.values():
        if array.dtype != "uint8" or array.stype != STORED_AS:
            raise BadMessage(f"a message of another app: its array is {array.dtype} stored as {array.stype[:40]!r}")
    if len(arrays) == 1:
        return arrays["message"].data, dict(fields)
    return bytearray().join(arrays[name].data for name in islice(_array_names(), len(arrays))), dict(fields)


@dataclass(frozen=True)
class ConnectedNode:
    """A connected node: its id (an unsigned 64-bit number that Flower assigns) and its key."""

    id: int
    key: str
    """SHA-256 of the public key that the SuperLink has registered for the node; empty without one."""


def nodes(grid: Grid) -> list[ConnectedNode]:
    """Return the nodes that are connected now, ordered by id."""
    found = []
    for info in grid.get_nodes():
        key = bytes(info.public_key)
        found.append(ConnectedNode(int(info.node_id), hashlib.sha256(key).hexdigest() if key else ""))
    return sorted(found, key=lambda node: node.id)


GROUP = "fedfactor-longest-"
"""Start of the group of our messages; the bytes of the longest valid answer follow, for the SuperLink's guard."""


def instruction(content: RecordDict, node: int, kind: str, ttl: float, longest: int | None) -> Message:
    """Return a message to a node; Flower drops it after `ttl` seconds, and the SuperLink refuses longer answers.

    Flower's message id is a hash of the message, and anyone who knows the id could answer in the node's place. A random
    field makes the id impossible to guess.
    """
    fields = content["fields"]
    assert isinstance(fields, ConfigRecord)
    fields["once"] = secrets.token_hex(16)  # `content.config_records` would keep the content in memory: it has a cycle
    return Message(content, node, kind, ttl=ttl, group_id="" if longest is None else f"{GROUP}{longest}")


def push(grid: Grid, message: Message) -> str | None:
    """Send one message and return its id; `None` if the SuperLink did not accept it."""
    numbers = [number for number in grid.push_messages([message]) if number]
    return numbers[0] if numbers else None


@dataclass(frozen=True)
class NodeAnswer:
    """The answer to a message: its content, or Flower's description of the error."""

    to: str
    """Id of the message that is answered."""
    node: int
    """Id of the sender according to the answer itself; meaningless in errors."""
    content: RecordDict | None
    error: str = ""
    fault: bool = False
    """Whether the error is an answer that cannot be read, or is too long."""


class Inbox:
    """Pulls the answer to each message separately, so that a faulty answer affects its own message only.

    Flower assembles an answer within a pull: it waits until all parts have arrived, which takes minutes if a node is
    slow or malicious, and raises an error if one of them is faulty. Pulling several messages at once would then lose
    the other answers. The metadata of an answer come from its sender, but the SuperLink knows which message it answers.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, _Pull] = {}

    def pull(self, grid: Grid, numbers: Iterable[str], longest: int = 0) -> Iterator[NodeAnswer]:
        """Yield answers to these messages as they are pulled, one by one; a slow pull continues in the background.

        `longest` is the length of the longest answer in bytes: a pull is slow if it takes longer than such an answer.
        """
        patience = PATIENCE + longest / USUAL_SPEED
        for number in numbers:
            pulling = self._under_way.pop(number, None) or _Pull(grid, number, patience)
            if pulling.is_done():
                yield from pulling.answers()
            else:
                self._under_way[number] = pulling


PATIENCE, USUAL_SPEED = 2.0, 10e6
"""Seconds after which the next pull starts although this one has not finished, and bytes per second of long answers: if
all were pulled at once, they would all be in memory."""


class _Pull:
    """The pull of one answer, in a daemon thread."""

    def __init__(self, grid: Grid, number: str, patience: float) -> None:
        self._grid, self._number = grid, number
        self._found: list[NodeAnswer] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._thread.join(patience)

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def answers(self) -> Iterator[NodeAnswer]:
        if self._error is not None:
            raise self._error
        while self._found:
            yield self._found.pop(0)

    def _run(self) -> None:
        try:
            self._found = [self._read(reply) for reply in self._grid.pull_messages([self._number])]
        except (httpx.HTTPError, OSError) as error:
            self._error = error  # the connection to the SuperLink failed
        except Exception as error:  # the node's answer is faulty
            reason = f"its answer cannot be read ({type(error).__name__}: {error})"
            self._found = [NodeAnswer(self._number, 0, None, reason, fault=True)]
        except BaseException as error:
            self._error = error

    def _read(self, reply: Message) -> NodeAnswer:
        meta = reply.metadata
        if reply.has_error():
            word = ERRORS.get(reply.error.code, f"error {reply.error.code}")
            reason = " ".join((reply.error.reason or "").split())
            text, fault = f"{word}: {reason}".rstrip(": "), reply.error.code == REFUSED
            return NodeAnswer(self._number, meta.src_node_id, None, text, fault)
        return NodeAnswer(self._number, meta.src_node_id, reply.content)


REFUSED = 413
"""Error code of our SuperLink (`superlink.py`) for an answer that is longer than its job allows."""
ERRORS = {
    1: "the app could not be loaded on the node",
    2: "the app failed on the node",
    3: "the message expired, or was lost",
    4: "the reply was lost",
    5: "the node was lost",
    7: "the node refused the app bundle",
    8: "the app's process on the node ended",
    REFUSED: "the SuperLink refused the answer",
}
"""Messages for Flower's error codes, and for ours."""
