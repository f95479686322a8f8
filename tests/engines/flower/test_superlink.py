"""The SuperLink behind its guard: other machines get only what nodes need, and nodes send only what jobs allow."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.app import Message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.server.superlink.linkstate import sql_linkstate
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.superlink import main
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from flwr.superlink.servicer.fleet import fleet_handlers
from starlette.exceptions import HTTPException

from fedfactor.engines.flower import adapter, superlink
from fedfactor.engines.flower.superlink import LONGEST_PIECE, LONGEST_REQUEST, PIECE, AnnouncedAnswers, Bounded
from tests.helpers.grid import FIRST_ID, LocalGrid, taken_apart

ELSEWHERE = "192.0.2.7"


def test_the_superlink_is_served_behind_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    served: dict[str, Any] = {}
    monkeypatch.setattr(fleet_handlers, "push_messages", fleet_handlers.push_messages)  # put back after the test
    monkeypatch.setattr(sys, "argv", ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", "1"])
    monkeypatch.setattr("uvicorn.run", lambda app, **options: served.update(options, app=app))
    superlink.main()
    app = served.pop("app")
    assert isinstance(app, superlink.LocalOnly) and isinstance(app._app, Bounded)
    assert isinstance(fleet_handlers.push_messages, AnnouncedAnswers)
    assert served == {"host": "127.0.0.1", "port": 1, "ssl_keyfile": None, "ssl_certfile": None}


def test_what_nodes_need_and_what_they_do_not_are_told_apart_by_paths() -> None:
    paths = {route.path for router in (main.fleet_router, main.control_router) for route in router.routes}  # type: ignore[attr-defined]
    for path in paths:
        assert path.startswith(("/v1/fleet/", "/v1/control/")), path
    assert {"/v1/fleet/push-object", "/v1/fleet/push-messages"} <= paths


def asked(app: Any, path: str, peer: str, *parts: bytes, length: int | None = None) -> list[Any]:
    """Return the statuses that an application sends for a request whose body comes in parts."""
    sent, coming = list[Any](), list(parts or [b""])
    headers = [] if length is None else [(b"content-length", str(length).encode())]

    async def receive() -> Any:
        if not coming:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": coming.pop(0), "more_body": bool(coming) or length == -1}

    async def send(message: Any) -> None:
        sent.append(message.get("status"))

    scope = {"type": "http", "path": path, "client": (peer, 1), "headers": headers}
    asyncio.run(app(scope, receive, send))
    return sent


def passing(seen: list[bytes]) -> Any:
    """Return an application that records the bodies it reads."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        seen.append(message["body"])
        assert not message["more_body"]
        await send({"status": 200})

    return app


def test_other_machines_get_what_nodes_need_alone() -> None:
    app = superlink.LocalOnly(passing([]))
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/fleet", "/"):
        assert asked(app, path, ELSEWHERE)[0] == 403
        assert asked(app, path, "127.0.0.1") == asked(app, path, "::1") == [200]
    for path in ("/v1/fleet/pull-messages", "/health"):
        assert asked(app, path, ELSEWHERE) == [200]


@pytest.mark.parametrize(("name", "most"), [("push-object", LONGEST_PIECE), ("push-messages", LONGEST_REQUEST)])
def test_a_request_that_is_too_long_is_refused_before_it_is_read(name: str, most: int) -> None:
    seen = list[bytes]()
    app, path = Bounded(passing(seen)), f"/v1/fleet/{name}"
    body = b"x" * most
    assert asked(app, path, ELSEWHERE, body, length=most) == [200] and seen.pop() == body
    assert asked(app, path, ELSEWHERE, body[:-9], b"x" * 9) == [200] and seen.pop() == body
    assert asked(app, path, "127.0.0.1", length=most + 1)[0] == 413, "by its header, on this machine too"
    assert asked(app, path, ELSEWHERE, body, b"x", b"never read" * 9)[0] == 413, "of unknown length"
    assert asked(app, path, ELSEWHERE, length=-1)[0] == 413
    assert not seen and not app._under_way
    assert asked(app, "/v1/control/start-run", "127.0.0.1", body, length=most + 1) == [200], "the bundle of an app"


def test_a_request_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink, "SECONDS", 0.05)

    sent = list[Any]()

    async def receive() -> Any:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message.get("status"))

    scope = {"type": "http", "path": "/v1/fleet/push-object", "client": (ELSEWHERE, 1), "headers": []}
    asyncio.run(Bounded(passing([]))(scope, receive, send))
    assert sent[0] == 408


def test_one_machine_cannot_have_many_requests_under_way() -> None:
    statuses = list[int]()

    async def many() -> None:
        release = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await release.wait()
            await send({"status": 200})

        async def receive() -> Any:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            if message.get("status"):
                statuses.append(message["status"])

        guard = Bounded(app)

        def one(peer: str) -> Any:
            scope = {"type": "http", "path": "/v1/fleet/get-run", "client": (peer, 1), "headers": []}
            return asyncio.ensure_future(guard(scope, receive, send))

        tasks = [one(peer) for peer in [ELSEWHERE] * (superlink.MOST_REQUESTS + 2) + ["127.0.0.1"] * 40 + ["192.0.2.8"]]
        await asyncio.sleep(0.01)
        assert statuses == [429, 429]
        release.set()
        await asyncio.gather(*tasks)

    asyncio.run(many())
    assert statuses.count(200) == superlink.MOST_REQUESTS + 41


def test_a_hostile_client_of_the_real_application_is_refused() -> None:
    read = list[int]()

    async def endless() -> AsyncIterator[bytes]:
        for number in range(1000):
            read.append(number)
            yield b"x" * PIECE

    async def attack() -> None:
        guarded = superlink.LocalOnly(Bounded(main.create_app()))
        transport = httpx.ASGITransport(guarded, client=(ELSEWHERE, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://superlink") as client:
            flood = await client.post("/v1/fleet/push-messages", content=b"x" * (LONGEST_REQUEST + 1))
            assert flood.status_code == 413 and "longer than" in flood.text
            stream = await client.post("/v1/fleet/push-object", content=endless())
            assert stream.status_code == 413 and len(read) < 4
            assert (await client.post("/v1/control/start-run", content=b"")).status_code == 403
            assert (await client.get("/health")).status_code == 200
            passed = await client.post("/v1/fleet/push-messages", content=b"x" * LONGEST_REQUEST)
            assert passed.status_code == 415, "Flower itself has read it, and misses the type of its content"

    asyncio.run(attack())


# An announced answer must fit the message that it answers.


def announced(pieces: int, answered: str = "m") -> PushMessagesRequest:
    request = PushMessagesRequest()
    request.messages_list.add().metadata.reply_to_message_id = answered
    tree = request.message_object_trees.add()
    for _ in range(pieces - 1):
        tree.children.add()
    return request


def state_of(group: str) -> Any:
    return SimpleNamespace(message_ins_store={"m": SimpleNamespace(metadata=SimpleNamespace(group_id=group))})


def test_an_answer_may_be_as_long_as_the_longest_valid_one(monkeypatch: pytest.MonkeyPatch) -> None:
    LocalGrid([], {})
    assert adapter.ARRAY_PIECES == superlink.ARRAY_PIECES
    for module in (adapter, superlink):
        monkeypatch.setattr(module, "ARRAY_PIECES", 2)
    for longest in (1, PIECE - 1, PIECE, 2 * PIECE + 1):
        sent = adapter.instruction(adapter.pack(b"x", {"run": "r"}), FIRST_ID, "train", 60.0, longest)
        assert sent.metadata.group_id == f"{superlink.GROUP}{longest}" and adapter.GROUP == superlink.GROUP
        sent.metadata.__dict__["_message_id"] = sent.object_id
        data = b"".join(bytes([i]) * PIECE for i in range(3))[:longest]  # pieces that differ
        reply = Message(adapter.pack(data, {"state": "", "seconds": 1.0}), reply_to=sent)
        count, most = len(taken_apart(reply)), superlink.most_objects(sent.metadata.group_id)
        assert count == most, "no more is allowed than such an answer has"
    assert superlink.most_objects("7") == superlink.most_objects("") == float("inf"), "a message of another app"


def test_both_of_flowers_stores_tell_the_group_of_a_message() -> None:
    assert superlink.group_of(state_of("g"), "m") == "g" and superlink.group_of(state_of("g"), "other") is None
    assert "message_ins_store" in vars(InMemoryLinkState(NoOpFederationManager(), InMemoryObjectStore()))
    columns = {column.name: None for column in sql_linkstate.MessageInsModel.__table__.columns}
    row = sql_linkstate._message_model_to_dict(sql_linkstate.MessageInsModel(**{**columns, "group_id": "g"}))
    assert row["group_id"] == "g"
    state = SimpleNamespace(get_valid_message_ins={"m": row}.get)
    assert superlink.group_of(state, "m") == "g" and superlink.group_of(state, "other") is None
    assert "message_id" in inspect.signature(sql_linkstate.SqlLinkState.get_valid_message_ins).parameters


def test_the_server_learns_at_once_that_an_answer_was_too_long() -> None:
    LocalGrid([], {})
    sent = adapter.instruction(adapter.pack(b"x", {"run": "r"}), FIRST_ID, "train", 60.0, PIECE)
    sent.metadata.__dict__["_message_id"] = sent.object_id
    request = PushMessagesRequest(
        messages_list=[message_to_proto(Message(adapter.pack(b"y", {"state": ""}), reply_to=sent))],
        message_object_trees=announced(7).message_object_trees,
    )
    state, stored, passed = state_of(sent.metadata.group_id), dict[str, bytes](), list[Any]()
    state.message_ins_store[sent.object_id] = sent
    state.store_object = lambda run, session, name, content: stored.update({name: content})
    guard = AnnouncedAnswers(lambda request, state: passed.append(request) or PushMessagesResponse(session_id="s"))
    with pytest.raises(HTTPException) as long:
        guard(request=request, state=state)
    assert long.value.status_code == 413 and "has 7 pieces, the message allows 6" in long.value.detail
    (only,) = passed
    ((name, content),) = stored.items()
    assert [name] == [only.message_object_trees[0].object_id] == [only.messages_list[0].metadata.message_id]
    answer = inflate_object_from_contents(name, {name: content})
    assert isinstance(answer, Message)
    (found,) = adapter.Inbox().pull(SimpleNamespace(pull_messages=lambda numbers: [answer]), [sent.object_id])  # type: ignore[arg-type]
    assert found.content is None and found.fault and found.to == sent.object_id
    assert found.error == "the SuperLink refused the answer: the answer has 7 pieces, the message allows 6"


def test_answers_that_are_unasked_or_repeated_are_refused() -> None:
    state, passed = state_of(f"{superlink.GROUP}{PIECE}"), list[Any]()
    guard = AnnouncedAnswers(lambda request, state: passed.append(request))
    with pytest.raises(HTTPException) as unasked:
        guard(request=announced(1, "unknown"), state=state)
    assert unasked.value.status_code == 404
    with pytest.raises(HTTPException) as several:
        guard(request=PushMessagesRequest(), state=state)
    assert several.value.status_code == 400
    assert not passed
    for _ in range(superlink.MOST_PUSHES):
        guard(request=announced(6), state=state)
    with pytest.raises(HTTPException) as again:
        guard(request=announced(6), state=state)
    assert again.value.status_code == 429 and len(passed) == superlink.MOST_PUSHES
