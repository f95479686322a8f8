"""Flower's SuperLink, except that only its own machine may start runs or register keys.

Flower serves nodes, the command line and its own processes on one port, and does not authenticate requests to start
runs or to register keys: anyone who reaches the port could run code on every node. Here, other machines reach only the
paths that nodes need. The script takes the arguments of `flower-superlink`.

Flower loads extra middleware from its enterprise package only (`flwr.superlink.extensions`), so this builds Flower's
application from its own functions and serves it behind `LocalOnly`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

import uvicorn
from flwr.superlink.main import create_app
from starlette.responses import PlainTextResponse

NODE_PATHS = ("/v1/fleet/", "/health")
LOCAL = ("127.0.0.1", "::1")


class LocalOnly:
    """ASGI application that serves another one and refuses other machines all paths that nodes do not need."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "lifespan":
            peer = (scope.get("client") or ("",))[0]
            if peer not in LOCAL and not scope["path"].startswith(NODE_PATHS):
                refusal = PlainTextResponse("only the machine of the SuperLink may request this\n", 403)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def main() -> None:
    """Serve until the process is stopped."""
    command = import_module("flwr.superlink.cli.flower_superlink")  # a function of the same name hides the module
    config = command._parse_superlink_lifespan_config()
    app = LocalOnly(create_app(config, command.SuperLinkLifespan))
    uvicorn.run(
        app, host=config.host, port=config.port, ssl_keyfile=config.ssl_keyfile, ssl_certfile=config.ssl_certfile
    )


if __name__ == "__main__":
    main()
