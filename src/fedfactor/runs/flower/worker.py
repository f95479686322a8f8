"""The worker of a node: `python -m fedfactor.runs.flower.worker SOCKET` answers what the ClientApps pass on to it.

Data and networks of one run at a time stay in memory. A message of another run drops them, so that a new run reads the
data as they are then.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fedfactor.engines.flower.warm import Answer, serve
from fedfactor.runs.flower.device import setup_on_node
from fedfactor.runs.flower.node import reply


class Worker:
    """Answers messages, and remembers which run the loaded data belong to."""

    def __init__(self) -> None:
        self._run = ""

    def answer(self, asked: dict[str, Any], job: bytearray | None) -> Answer:
        """Return the answer to a message."""
        run = str(asked["fields"].get("run"))
        if run != self._run:
            setup_on_node.cache_clear()
            self._run = run
        return reply(asked, job)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Worker().answer)
