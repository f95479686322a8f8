"""Flower's SuperLink, of which only this machine can ask for runs.

Flower serves nodes, the command line and its own processes on one port, and asks those who start runs or register keys
for nothing: whoever reaches the port could have code of theirs run on every node. Here all but what nodes need is
answered on this machine alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import entry_points
from typing import Any

from flwr.superlink import extensions
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

FOR_NODES = ("/v1/fleet/", "/health")
HERE = ("127.0.0.1", "::1")


class OnlyHere:
    """Refuses other machines everything but what nodes need."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            peer = (scope.get("client") or ("",))[0]
            if peer not in HERE and not scope["path"].startswith(FOR_NODES):
                refusal = PlainTextResponse("only the machine of the SuperLink may ask for this\n", 403)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def main() -> None:
    """Run `flower-superlink` with its own arguments."""
    extensions.get_middleware = lambda: (Middleware(OnlyHere),)
    (command,) = entry_points(group="console_scripts", name="flower-superlink")
    command.load()()


if __name__ == "__main__":
    main()
