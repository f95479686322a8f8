"""Ctrl-C: the round that is going on is finished and committed, and the person is told how to carry on."""

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
    """While it is entered, Ctrl-C stops a run that it listens to at its next commit, and a second one stops it at once.

    Either way `KeyboardInterrupt` is raised, and everything up to `round` is committed. `tell` is called within the
    signal's handler, where it is not safe to print.
    """

    def __init__(self, tell: Callable[[str], None] = lambda words: None) -> None:
        self._tell = tell
        self.asked = False
        self.round = 0
        """The last committed round of the run that is going on."""

    def __enter__(self) -> Stop:
        self._before = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def listen(self, event: dict[str, Any]) -> None:
        """Stop if this was a commit."""
        if event["event"] in ("start", "resumed", "committed"):
            self.round = event.get("round", 0)
        if self.asked and event["event"] == "committed":
            raise KeyboardInterrupt

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._tell("stopping when this round is done and committed; Ctrl-C again stops at once, without it")


def each(*listeners: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Return a listener that tells all of these, in order."""

    def listen(event: dict[str, Any]) -> None:
        for listener in listeners:
            listener(event)

    return listen


def resume_command(arguments: Sequence[str]) -> str:
    """Return the command that carries on what a command (its `sys.argv`) has begun, fit to be pasted."""
    program, *words = arguments
    found = shutil.which("fedfactor")
    if Path(program).name != "fedfactor" or (found and Path(found).samefile(program)):
        program = "fedfactor"
    elif Path(program).is_absolute():
        program = min(program, os.path.relpath(program), key=len)
    return shlex.join([program, *words, *([] if "--resume" in words else ["--resume"])])
