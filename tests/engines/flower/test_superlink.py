"""The SuperLink behind its guard: other machines get only what nodes need."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from flwr.superlink import main

from fedfactor.engines.flower import superlink


def test_the_superlink_is_served_behind_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    served: dict[str, Any] = {}
    monkeypatch.setattr(sys, "argv", ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", "1"])
    monkeypatch.setattr("uvicorn.run", lambda app, **options: served.update(options, app=app))
    superlink.main()
    assert isinstance(served.pop("app"), superlink.LocalOnly)
    assert served == {"host": "127.0.0.1", "port": 1, "ssl_keyfile": None, "ssl_certfile": None}


def test_what_nodes_need_and_what_they_do_not_are_told_apart_by_paths() -> None:
    paths = {route.path for router in (main.fleet_router, main.control_router) for route in router.routes}  # type: ignore[attr-defined]
    for path in paths:
        assert path.startswith(("/v1/fleet/", "/v1/control/")), path


def asked(path: str, peer: str) -> list[Any]:
    """Return what the guard sends for a request, `passed on` if it lets it through."""
    sent = list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("passed on")

    async def send(message: Any) -> None:
        sent.append(message.get("status"))

    asyncio.run(superlink.LocalOnly(app)({"type": "http", "path": path, "client": (peer, 1)}, None, send))
    return sent


def test_other_machines_get_what_nodes_need_alone() -> None:
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/fleet", "/"):
        assert asked(path, "192.0.2.7")[0] == 403
        assert asked(path, "127.0.0.1") == asked(path, "::1") == ["passed on"]
    for path in ("/v1/fleet/pull-messages", "/health"):
        assert asked(path, "192.0.2.7") == ["passed on"]
