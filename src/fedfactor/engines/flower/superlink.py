"""Flower's SuperLink behind a guard: who may request what, and how much a node may send.

Flower serves nodes, the command line and its own processes on one port, and does not authenticate requests to start
runs or to register keys: anyone who reaches the port could run code on every node. Here, other machines reach only the
paths that nodes need. Flower also reads a request of any length into memory, before it looks who sent it, and stores
answers of any length. Here, a node can send what the job that it answers allows, once, and within a limited time. The
script takes the arguments of `flower-superlink`.

Flower loads extra middleware from its enterprise package only (`flwr.superlink.extensions`), so this builds Flower's
application from its own functions and serves it behind `LocalOnly` and `Bounded`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

import uvicorn
from flwr.app import Error
from flwr.app.message import make_message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as PIECE
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.inflatable.inflatable_object import get_object_tree, iterate_object_tree
from flwr.superlink.main import create_app
from flwr.superlink.servicer.fleet import fleet_handlers
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

FLEET = "/v1/fleet/"
NODE_PATHS = (FLEET, "/health")
LOCAL = ("127.0.0.1", "::1")

GROUP = "fedfactor-longest-"
"""The same as in `adapter.py`, which this script does not import, because it would start more slowly."""
REFUSED = 413
"""The same as in `adapter.py`."""
LONGEST_REQUEST = 1 << 20
"""Bytes of a request of a node that does not send a piece of an answer."""
LONGEST_PIECE = PIECE + (1 << 16)
"""Bytes of a request that sends one: Flower cuts arrays into pieces."""
SECONDS = 300.0
"""Time in which a request must have arrived completely."""
MOST_REQUESTS = 32
"""Requests of one other machine that may be under way at a time. A node needs two or three."""
WRAPPING = 4
"""Objects of an answer besides its arrays and their pieces: message, records, fields, record of arrays."""
ARRAY_PIECES = 4
"""Pieces of each array, except the last one: see `adapter.py`."""
MOST_PUSHES = 3
"""How often a node may announce its answer to a message: Flower repeats a request if the connection failed."""

App = Callable[..., Awaitable[None]]


class LocalOnly:
    """ASGI application that serves another one and refuses other machines all paths that nodes do not need."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "lifespan" and _peer(scope) not in LOCAL and not scope["path"].startswith(NODE_PATHS):
            await _refuse("only the machine of the SuperLink may request this", 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class Bounded:
    """ASGI application that serves another one and bounds the requests of nodes: their length, time and number."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._under_way = Counter[str]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http" or not scope["path"].startswith(FLEET):
            await self._app(scope, receive, send)
            return
        peer = _peer(scope)
        if peer not in LOCAL and self._under_way[peer] >= MOST_REQUESTS:
            await _refuse(f"more than {MOST_REQUESTS} requests at a time", 429)(scope, receive, send)
            return
        self._under_way[peer] += 1
        try:
            await self._bounded(scope, receive, send)
        finally:
            self._under_way[peer] -= 1
            self._under_way += Counter()  # drops peers without requests

    async def _bounded(self, scope: Any, receive: Any, send: Any) -> None:
        most = LONGEST_PIECE if scope["path"] == f"{FLEET}push-object" else LONGEST_REQUEST
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        body, complete = bytearray(), False
        if declared.isdigit() and int(declared) <= most:
            try:
                async with asyncio.timeout(SECONDS):
                    while not complete and len(body) <= most:
                        message = await receive()
                        if message["type"] != "http.request":  # the connection is closed
                            return
                        body += message.get("body", b"")
                        complete = not message.get("more_body", False)
            except TimeoutError:
                await _refuse(f"the request did not arrive within {SECONDS:g} seconds", 408)(scope, receive, send)
                return
        if not complete or len(body) > most:
            await _refuse(f"the request is longer than {most} bytes", 413)(scope, receive, send)
            return
        read = False

        async def again() -> Any:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self._app(scope, again, send)


def _peer(scope: Any) -> str:
    return str((scope.get("client") or ("",))[0])


def _refuse(reason: str, status: int) -> App:
    return PlainTextResponse(f"{reason}\n", status, headers={"connection": "close"})


class AnnouncedAnswers:
    """Takes the place of Flower's handler for the announcement of an answer, and refuses what its job does not allow.

    Flower accepts pieces of announced answers only. So an answer that is refused here is never read.
    """

    def __init__(self, push_messages: Callable[..., Any]) -> None:
        self._push_messages = push_messages
        self._pushes: dict[str, int] = {}

    def __call__(self, request: Any, state: Any) -> Any:
        """Handle a request of a node that has proved its identity."""
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise HTTPException(400, "expected one answer")
        answered = request.messages_list[0].metadata.reply_to_message_id
        group = group_of(state, answered)
        if group is None:
            raise HTTPException(404, "no message waits for this answer")
        count = sum(1 for _ in iterate_object_tree(request.message_object_trees[0]))
        most = most_objects(group)
        if count > most:
            reason = f"the answer has {count} pieces, the message allows {most}"
            self._answer_instead(request, state, reason)
            raise HTTPException(413, reason)
        pushes = self._pushes.pop(answered, 0) + 1  # the latest last
        self._pushes[answered] = pushes
        while len(self._pushes) > MOST_REMEMBERED:
            del self._pushes[next(iter(self._pushes))]
        if pushes > MOST_PUSHES:
            raise HTTPException(429, f"the answer was announced {pushes} times")
        return self._push_messages(request=request, state=state)

    def _answer_instead(self, request: Any, state: Any, reason: str) -> None:
        """Store an error as the node's answer: otherwise the server waits for it until the deadline of the round."""
        metadata = message_from_proto(request.messages_list[0]).metadata
        answer = make_message(metadata=metadata, error=Error(REFUSED, reason))
        metadata.__dict__["_message_id"] = answer.object_id
        announced = PushMessagesRequest(
            node=request.node, messages_list=[message_to_proto(answer)], message_object_trees=[get_object_tree(answer)]
        )
        pushed = self._push_messages(request=announced, state=state)
        state.store_object(metadata.run_id, pushed.session_id, answer.object_id, answer.deflate())


MOST_REMEMBERED = 100_000
"""Messages whose announcements are counted; those of the oldest ones are forgotten."""


def group_of(state: Any, message: str) -> str | None:
    """Return the group of a message that waits for its answer; `None` if there is no such message."""
    if hasattr(state, "message_ins_store"):  # in memory
        found = state.message_ins_store.get(message)
        return None if found is None else str(found.metadata.group_id)
    row = state.get_valid_message_ins(message)  # in a database
    return None if row is None else str(row["group_id"])


def most_objects(group: str) -> float:
    """Return the number of Flower's objects in the longest answer to a message of a group."""
    longest = group.removeprefix(GROUP)
    if longest == group or not longest.isdigit():  # of another app
        return math.inf
    pieces = math.ceil(int(longest) / PIECE)
    return pieces + max(1, math.ceil(pieces / ARRAY_PIECES)) + WRAPPING


def main() -> None:
    """Serve until the process is stopped."""
    fleet_handlers.push_messages = AnnouncedAnswers(fleet_handlers.push_messages)
    command = import_module("flwr.superlink.cli.flower_superlink")  # a function of the same name hides the module
    config = command._parse_superlink_lifespan_config()
    app = LocalOnly(Bounded(create_app(config, command.SuperLinkLifespan)))
    uvicorn.run(
        app, host=config.host, port=config.port, ssl_keyfile=config.ssl_keyfile, ssl_certfile=config.ssl_certfile
    )


if __name__ == "__main__":
    main()
