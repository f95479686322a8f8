"""Flower's SuperNode, except that it looks for messages more often after it has answered one.

Flower looks every three seconds, which is longer than a short round takes. Here, the pause starts at a tenth of a
second and doubles up to Flower's own, so that a node that waits long does not ask more often than Flower's. The script
takes the arguments of `flower-supernode`.
"""

from __future__ import annotations

import time
from importlib import import_module

SHORTEST = 0.1
"""Seconds of the first pause after an answer, and between two looks for the answer of the ClientApp."""
IDLE = 3
"""Seconds for which Flower's loop sleeps when there is no message."""


class Pauses:
    """Takes the place of the module `time` in Flower's loop, which calls only `sleep`."""

    def __init__(self) -> None:
        self._pause = SHORTEST

    def sleep(self, seconds: float) -> None:
        """Sleep at most for these seconds."""
        if seconds == IDLE:
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, seconds)
        else:  # a ClientApp is at work
            time.sleep(SHORTEST)
            self._pause = SHORTEST


def main() -> None:
    """Run the SuperNode until the process is stopped."""
    import_module("flwr.supernode.start_client_internal").time = Pauses()  # type: ignore[attr-defined]
    import_module("flwr.supernode.cli.flower_supernode").flower_supernode()


if __name__ == "__main__":
    main()
