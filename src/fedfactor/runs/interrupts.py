"""Ctrl-C: the current round is finished and committed, and the user is told how to resume."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any


class Stop:
    """Context manager in which Ctrl-C stops a run at its next commit, and a second Ctrl-C stops it immediately.

    Both raise `KeyboardInterrupt`; everything up to `round` is committed. `tell` is called in the signal handler, where
    printing is not safe. `listen` must get the events of the run.
    """

    def __init__(self, tell: Callable[[str], None] = lambda words: None) -> None:
        self._tell = tell
        self.asked = False
        self.round = 0
        """The last committed round of the current run."""

    def __enter__(self) -> Stop:
        self._before = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def listen(self, event: dict[str, Any]) -> None:
        """Raise KeyboardInterrupt if this event is a commit and Ctrl-C was pressed."""
        if event["event"] in ("start", "resumed", "committed"):
            self.round = event.get("round", 0)
        if self.asked and event["event"] == "committed":
            raise KeyboardInterrupt

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._tell("stopping when this round is committed; press Ctrl-C again to stop immediately and lose this round")


def each(*listeners: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Return a listener that passes each event to all of these, in order."""

    def listen(event: dict[str, Any]) -> None:
        for listener in listeners:
            listener(event)

    return listen


def resume_command(arguments: Sequence[str]) -> str:
    """Return the shell command that resumes the run of a command, given its `sys.argv`."""
    program, *words = arguments
    found = shutil.which("fedfactor")
    if Path(program).name != "fedfactor" or (found and Path(found).samefile(program)):
        program = "fedfactor"
    elif Path(program).is_absolute():
        program = min(program, os.path.relpath(program), key=len)
    return shlex.join([program, *words, *([] if "--resume" in words else ["--resume"])])
