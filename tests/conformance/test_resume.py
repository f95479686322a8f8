"""Promise 2: killed at any moment and resumed is the same as never stopped, to the bit, private state included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.killing import ROUNDS, outcome

ROOT = Path(__file__).parents[2]


# A commit only sees tensors: those of the server, of clients, of both, what the server stores per client, moves of a
# base, and tensors of another form. The promises resume every method from a commit.
CONTENTS = ["fedavg", "local", "pfedpara", "fedcac", "flora", "pufferfish"]


@pytest.mark.parametrize("methods", [CONTENTS[start::2] for start in range(2)], ids=",".join)
def test_ended_at_every_commit_point_and_resumed(methods: list[str], tmp_path: Path) -> None:
    """Several methods in one process, since its imports take longest."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.killing", "exit", ",".join(methods), str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before = ["nothing", *(f"round-{n}" for n in range(ROUNDS))]
    reached = {"before": before, "states": before, "pointer": [f"round-{n}" for n in range(ROUNDS + 1)]}
    assert json.loads(done.stdout) == {method: {"reached": reached, "differing": []} for method in methods}


def test_the_command_killed_at_random_moments_and_resumed(tmp_path: Path) -> None:
    methods = ["pfedpara", "fedcac"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.killing", "command", ",".join(methods), str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == methods
    for method, ended in found.items():
        assert ended.pop("landed") >= 1, f"{method}: no kill landed before the end of the run"
        assert ended == {"codes": [0, 0], "kept": [1, 3], "differing": []}, f"{method}: {done.stderr}"


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first = outcome("fedper", tmp_path)
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors"))
    assert outcome("fedper", tmp_path) == first
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")) == before
