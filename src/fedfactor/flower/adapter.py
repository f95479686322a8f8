"""All that this package knows of flwr: what it imports, how a message is packed, and what is switched off.

flwr changes often, so it is pinned, nothing else imports it but `control.py` and `superlink.py`, which start runs, and
each thing it is relied on for has a test that fails first (`tests/flower/test_canaries.py`, `test_control.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedfactor.wire import BadMessage, Bytes

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
    "Message",
    "Node",
    "RecordDict",
    "ServerApp",
    "instruction",
    "nodes",
    "pack",
    "pull",
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


def instruction(content: RecordDict, node: int, kind: str, group: str, ttl: float) -> Message:
    """Return a message to a node; it is forgotten after `ttl` seconds."""
    return Message(content, node, kind, ttl=ttl, group_id=group)


def push(grid: Grid, message: Message) -> str | None:
    """Send one message and return its number; `None` if the SuperLink did not take it."""
    numbers = [number for number in grid.push_messages([message]) if number]
    return numbers[0] if numbers else None


@dataclass(frozen=True)
class Answer:
    """What came back for a message: its content, or Flower's word for what went wrong."""

    to: str
    """The number of the message that is answered. Errors name the wrong sender, but always the right message."""
    node: int
    """The sender; meaningless in errors."""
    content: RecordDict | None
    error: str = ""


def pull(grid: Grid, numbers: Iterable[str]) -> list[Answer]:
    """Return what has come back so far for these messages."""
    found = []
    for reply in grid.pull_messages(list(numbers)):
        meta = reply.metadata
        if reply.has_error():
            word = ERRORS.get(reply.error.code, f"error {reply.error.code}")
            reason = " ".join((reply.error.reason or "").split())
            found.append(Answer(meta.reply_to_message_id, meta.src_node_id, None, f"{word}: {reason}".rstrip(": ")))
        else:
            found.append(Answer(meta.reply_to_message_id, meta.src_node_id, reply.content))
    return found


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
