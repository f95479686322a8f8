"""Promise 2: killed at any moment and resumed is the same as never stopped, to the bit, private state included."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.killing import ROUNDS, outcome
from tests.helpers.tiny import METHODS, Tiny, data, run

ROOT = Path(__file__).parents[2]


SEVERAL = pytest.mark.parametrize("methods", [METHODS[start::3] for start in range(3)], ids=",".join)
"""In one process, since its imports take longest."""


@SEVERAL
def test_ended_at_every_commit_point_and_resumed(methods: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.killing", "exit", ",".join(methods), str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before = ["nothing", *(f"round-{n}" for n in range(ROUNDS))]
    reached = {"before": before, "states": before, "pointer": [f"round-{n}" for n in range(ROUNDS + 1)]}
    assert json.loads(done.stdout) == {method: {"reached": reached, "differing": []} for method in methods}


@SEVERAL
def test_the_command_killed_at_random_moments_and_resumed(methods: list[str], tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 9}, "seed was 5 and is now 9"),
        ({"lr": 0.2}, "lr was 0.05 and is now 0.2"),
        ({"method": "fedpara"}, "method was FedAvg"),
        ({"optimizer": "scaffold"}, "optimizer was FedAvgOptimizer"),
        ({"codec": "int8"}, "codec was Float32"),
        ({"cohort": 4}, "cohort was 3 and is now 4"),
        ({"data": data(even=False)}, "clients was 6"),
        ({"data": replace(data(), train_of=data().train_of[::-1])}, "clients was 6 .split .* and is now 6"),
        ({"data": replace(data(), train=(data().train[0], 9 - data().train[1]))}, "clients was 6 .split .* now 6"),
        ({"model": lambda: Tiny(0.5)}, "model was"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_carrying_on_with_other_settings_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    run("fedavg", rounds=1, directory=tmp_path)
    with pytest.raises(ValueError, match=f"started with other settings: .*{message}"):
        run(**{"method": "fedavg", "rounds": 2, "directory": tmp_path, **change})  # type: ignore[arg-type]
    assert run("fedavg", rounds=2, directory=tmp_path).summary["rounds"] == 2


def test_killed_while_the_journal_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Carrying on cuts what was written after the last commit; ending there must not lose what was committed."""
    run("fedavg", rounds=2, directory=tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "half a li')

    class Ended(Exception):
        pass

    def end(*_: object) -> None:
        raise Ended

    for moment in ("truncate", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(f"fedfactor.server.store.os.{moment}", end)
            with pytest.raises(Ended):
                run("fedavg", rounds=3, directory=tmp_path)
    assert run("fedavg", rounds=3, directory=tmp_path).summary == run("fedavg", rounds=3).summary


def test_strangers_files_in_a_checkpoint_do_no_harm(tmp_path: Path) -> None:
    run("fedper", rounds=1, directory=tmp_path)
    folder = next((tmp_path / "checkpoint" / "client").iterdir())
    (folder / ".DS_Store").touch()
    (folder / "notes.txt").touch()
    assert run("fedper", rounds=2, directory=tmp_path).summary == run("fedper", rounds=2).summary
