"""Keeps one program: nothing of it outlives whoever started the keeper.

`python keeper.py SECONDS PROGRAM ARGUMENT...` runs a program and ends as it does. Flower's programs start others, in
sessions of their own. When the program ends, when the keeper gets SIGTERM, or when its standard input ends (whoever
started it is gone, even by SIGKILL), all processes that come from it are killed before the keeper ends; the program
itself gets SIGTERM first, and so many seconds to take its leave. It is a script of the standard library alone, so that
it starts in a moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Their numbers in Linux' prctl.h."""


def main(leave: float, command: list[str]) -> int:
    """Run a program until it ends or is to end, and leave no process of it."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0
    # Processes whose parent died become the keeper's children, so that none can get lost.
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wanted = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: wanted.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # should the keeper itself be killed
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return 127
    threading.Thread(target=_wait_for_end_of_input, args=(wanted,), daemon=True).start()
    while program.poll() is None and not wanted.wait(0.05):
        pass
    if leave > 0 and program.poll() is None:
        program.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(leave)
    kill_descendants()
    code = program.wait()
    return code if code >= 0 else 128 - code


def _wait_for_end_of_input(wanted: threading.Event) -> None:
    while os.read(0, 1024):
        pass
    wanted.set()


def kill_descendants() -> None:
    """Kill all processes that come from this one, until there are none."""
    while found := descendants(os.getpid()):
        for process in found:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself
        _reap()
        time.sleep(0.02)


def _reap() -> None:
    """Take note of the ends of all children, adopted ones too."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def descendants(process: int) -> list[int]:
    """Return all processes that come from one, without the dead whose end nobody has noted yet."""
    children: dict[int, list[int]] = {}
    for one, parent in _parents():
        children.setdefault(parent, []).append(one)
    found, waiting = list[int](), [process]
    while waiting:
        new = children.get(waiting.pop(), [])
        found += new
        waiting += new
    return found


def _parents() -> list[tuple[int, int]]:
    """Return every living process with its parent."""
    if not Path("/proc/self/stat").exists():
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True)
        rows = [line.split() for line in listed.stdout.splitlines()]
        return [(int(row[0]), int(row[1])) for row in rows if not row[2].startswith("Z")]
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The name in brackets may hold anything.
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            if state != "Z":
                found.append((int(folder.name), int(parent)))
    return found


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
