"""A supervisor for one program: it leaves no process behind, however the program or its starter ends.

`python supervisor.py SECONDS PROGRAM ARGUMENT...` runs a program and exits with its exit code. The supervisor ends the
program when it receives SIGTERM, or when its standard input is closed: the process that started it has then ended, even
if by SIGKILL. The program first gets SIGTERM and SECONDS to end by itself. Afterwards every process that descends from
it is killed, also those in sessions of their own, as Flower's programs start them.

This file is run as a script and imports psutil alone, not this package, which would import torch: the supervised
program starts after 0.1 s of processor time instead of 3 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Constants of Linux's `prctl.h`."""


def main(grace: float, command: list[str]) -> int:
    """Run a program until it ends or has to end, kill all its descendants and return its exit code."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0
    # Orphaned descendants become children of the supervisor instead of init, so psutil still finds them.
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # if the supervisor itself is killed
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return 127
    threading.Thread(target=_wait_for_end_of_input, args=(stop,), daemon=True).start()
    while program.poll() is None and not stop.wait(0.05):
        pass
    if grace > 0 and program.poll() is None:
        program.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(grace)
    while descendants := psutil.Process().children(recursive=True):  # again: a killed process may just have forked
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        program.wait()  # before psutil collects its exit code
        psutil.wait_procs(descendants, timeout=1)
    code = program.wait()
    return code if code >= 0 else 128 - code


def _wait_for_end_of_input(stop: threading.Event) -> None:
    while os.read(0, 1024):
        pass
    stop.set()


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
