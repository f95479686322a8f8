"""Commands that start at once: each is a process of its own, forked from one that has imported everything already.

`run` is `subprocess.run` of the command line; `program` writes a stand-in for `fedfactor` or `python` that a shell finds.
What a test wants to kill it has to start by itself: here a small client stands for the process.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import types
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLIENT = """import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as place:
    place.connect({place!r})
    words = {words!r} + sys.argv[1:]
    asked = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(place, [len(asked).to_bytes(4, "big")], [0, 1, 2])
    place.sendall(asked)
    sys.exit(int(place.recv(16) or b"70"))
"""


@cache
def place() -> str:
    """Start the process to fork from, which ends with this one, and return where it listens."""
    folder = tempfile.TemporaryDirectory(prefix="warm")
    path = str(Path(folder.name, "socket"))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None

    def end() -> None:
        process.communicate()
        folder.cleanup()

    atexit.register(end)
    assert process.stdout.readline() == b"ready\n", "the process to fork from did not start"
    return path


def program(path: Path, *words: str) -> None:
    """Write a program that does what `words` and its own arguments say: `fedfactor ...` or `python script.py ...`."""
    path.write_text(f"#!{sys.executable} -S\n" + CLIENT.format(place=place(), words=list(words)))
    path.chmod(0o755)


def run(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `fedfactor` with these words."""
    code = CLIENT.format(place=place(), words=["fedfactor"])
    command = [sys.executable, "-S", "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def serve(path: str) -> list[str]:
    """Fork for everybody who asks; return, in the forked process, what it is to do."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            asker, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return answer(asker)
            asker.close()


def answer(asker: socket.socket) -> list[str]:
    """Fork once more, and tell how that process ended; return in it what it is to do."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(asker, 4, 3)
    with asker.makefile("rb") as stream:
        words, folder, environment = json.loads(stream.read(int.from_bytes(size, "big")))
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        asker.sendall(str(os.waitstatus_to_exitcode(status) % 256).encode())
        os._exit(0)
    asker.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]
    found: list[str] = words
    return found


NEEDED = (
    "fedfactor.advise", "fedfactor.cli", "fedfactor.engines", "fedfactor.export", "fedfactor.runs.loggers",
    "fedfactor.report.sections", "fedfactor.cli.screen", "fedfactor.runs.compare", "fedfactor.runs.simulate", "sklearn.datasets",
    "torch._dynamo",  # counting operations does
)  # fmt: skip


def main() -> None:
    """Import what commands need, then be whatever is asked for."""
    for name in NEEDED:
        importlib.import_module(name)
    gc.freeze()  # what is shared is not looked through again
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who answer
    if os.fork() == 0:
        sys.stdin.read()  # whoever started us is gone
        os.kill(os.getppid(), signal.SIGTERM)
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    name, *words = serve(sys.argv[1])
    sys.modules["__main__"] = types.ModuleType("__main__")  # not this file, for processes that come of it
    if name == "fedfactor":
        sys.argv = ["fedfactor", *words]
        importlib.import_module("fedfactor.cli").main()
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent.resolve()))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
