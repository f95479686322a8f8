"""No process of a program outlives the process that started it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from fedfactor.engines.flower.programs import Program

FAMILY = """
import os, subprocess, sys, time
child = "import time; time.sleep(600)"
own_session = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
middle = "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', %r], start_new_session=True, stdout=subprocess.DEVNULL).pid, flush=True)" % child
orphan = subprocess.check_output([sys.executable, "-c", middle], text=True).strip()
print(os.getpid(), own_session.pid, orphan, flush=True)
time.sleep(LENGTH)
"""
"""A program with a child in a session of its own and a grandchild whose parent has ended."""


def alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(tmp_path: Path, length: float = 600) -> tuple[Program, list[int]]:
    program = Program(
        "family", [sys.executable, "-c", FAMILY.replace("LENGTH", str(length))], tmp_path, tmp_path / "log"
    )
    end = time.monotonic() + 60
    while len(program.output().split()) < 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    return program, [int(word) for word in program.output().split()]


def gone(processes: list[int], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while any(alive(process) for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="orphans can only be adopted on Linux")
def test_stopping_leaves_no_process_not_even_orphans_in_sessions_of_their_own(tmp_path: Path) -> None:
    program, processes = family(tmp_path)
    assert all(alive(process) for process in processes)
    program.stop()
    assert not any(alive(process) for process in [*processes, program.supervisor])


@pytest.mark.skipif(sys.platform != "linux", reason="orphans can only be adopted on Linux")
def test_a_program_that_ends_takes_its_children_with_it(tmp_path: Path) -> None:
    program, processes = family(tmp_path, 0.5)
    assert program.wait(30) == 0
    assert not any(alive(process) for process in processes)
    program.stop()


def test_a_killed_starter_leaves_no_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    starter = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from fedfactor.engines.flower.programs import Program
        Program("one", [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"],
                Path({str(tmp_path)!r}), Path({str(log)!r}))
        time.sleep(600)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", starter], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    end = time.monotonic() + 60
    while not (log.exists() and log.read_text().strip()):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert gone([int(log.read_text())])


LEAVING = """
import pathlib, signal, sys, time
def leave(*_):
    pathlib.Path(sys.argv[1]).write_text("bye")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("here", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("grace", [0.0, 20.0])
def test_a_program_may_end_by_itself_within_its_grace_period(grace: float, tmp_path: Path) -> None:
    words = [sys.executable, "-c", LEAVING, str(tmp_path / "farewell")]
    program = Program("leaving", words, tmp_path, tmp_path / "log", grace=grace)
    end = time.monotonic() + 60
    while "here" not in program.output():
        assert time.monotonic() < end
        time.sleep(0.05)
    program.stop()
    assert (tmp_path / "farewell").exists() == (grace > 0)
    assert not alive(program.supervisor)
