"""Promise 2: killed at any moment and resumed is the same as never stopped, to the bit, private state included."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.killing import POINTS, ROUNDS, outcome
from tests.conformance.tiny import METHODS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("method", METHODS)
def test_ended_at_every_commit_point_and_resumed(method: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.conformance.killing", "exit", method, str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"landed": len(POINTS) * (ROUNDS + 1), "differing": []}


@pytest.mark.parametrize("method", ["fedavg", "pfedpara", "fedamp"])
def test_really_killed_between_first_and_last_commit_and_resumed(method: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.conformance.killing", "run", method, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "committed 1":
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    committed = (tmp_path / "checkpoint" / "current").read_text()
    assert committed in [f"round-{n}" for n in range(1, ROUNDS)], "no kill landed between the first and the last commit"
    resumed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    finished = json.loads(resumed.stdout.splitlines()[-1])
    assert finished == json.loads(json.dumps(outcome(method, None)))


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first = outcome("fedper", tmp_path)
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors"))
    assert outcome("fedper", tmp_path) == first
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")) == before
