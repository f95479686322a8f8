"""Run directories: locks, and which directories a run may use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from fedfactor.protocol.settings import Capacities
from fedfactor.runs.directory import ENROLLED, RunError, check_claim, finished, locked, reported
from fedfactor.runs.execute import run
from fedfactor.runs.open import load
from fedfactor.runs.sections import OBJECTS
from tests.helpers.recipes import recipe


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """A directory in which a run of the small recipe has committed its start."""
    (tmp_path / "recipe.toml").write_text(recipe().to_toml())
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "current").write_text("round-0")
    return tmp_path


def test_a_directory_without_a_commit_starts_at_round_0(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "start"}\n{"event": "rou')
    (tmp_path / "recipe.toml").write_text('name = "of another run that was killed before its first commit"\n')
    assert run(recipe(), tmp_path, resume=True).summary["rounds"] == 3
    assert load(tmp_path).recipe == recipe()


def test_a_directory_in_use_is_left_alone_without_resume(started: Path) -> None:
    before = sorted(started.rglob("*"))
    with pytest.raises(RunError, match="holds a run already; continue it with --resume"):
        run(recipe(), started)
    assert sorted(started.rglob("*")) == sorted([*before, started / "lock"])
    check_claim(recipe(), started, resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("method.name=local", "method.name was 'fedavg' and is now 'local'"),
        ("partition.clients=7", "partition.clients was 6 and is now 7"),
        ("train.lr=0.5", "train.lr was 0.05 and is now 0.5"),
        ("train.schedule=cosine", "train.schedule.kind was 'constant' and is now 'cosine'"),
    ],
)
def test_another_recipe_is_refused_naming_the_difference(change: str, message: str, started: Path) -> None:
    for use in (lambda: run(recipe(change), started, resume=True), lambda: finished(recipe(change), started)):
        with pytest.raises(RunError, match=f"started with another recipe: {message}$"):
            use()


def test_a_run_that_was_started_from_python_is_no_recipes(started: Path) -> None:
    tables = recipe().tables
    path = started / "recipe.toml"
    path.write_text(tomli_w.dumps({key: tables[key] for key in tables if key not in OBJECTS}))
    for resume in (False, True):
        with pytest.raises(RunError, match=r"was started from Python, by simulate\(\); continue it there"):
            run(recipe(), started, resume=resume)
    path.unlink()
    with pytest.raises(RunError, match=r"has no recipe\.toml"):
        run(recipe(), started, resume=True)


def test_what_cannot_be_a_directory_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunError, match=r"file.* cannot be a run directory \(.*\); give another one"):
            run(recipe(), place)


def test_a_second_process_is_refused_before_the_data_is_loaded(tmp_path: Path) -> None:
    holder = (
        "import sys, filelock\nwith filelock.FileLock(sys.argv[1]).acquire(timeout=0):\n print('held', flush=True)\n"
        " sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", holder, str(tmp_path / "lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=r"another process is using .*; wait for it, or give another directory"):
            run(recipe("data={name = 'cifar10'}"), tmp_path, data_dir=tmp_path / "there is no such folder")
        assert process.stdin is not None
        process.stdin.close()
    with locked(tmp_path):  # a lock ends with its process
        pass


def test_a_lock_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path / "new"):
        raise KeyError
    with locked(tmp_path / "new"), locked(tmp_path / "new", "another lock"):
        pass


def test_a_run_is_finished_when_all_its_rounds_are(started: Path) -> None:
    assert finished(recipe(), started) is None
    for rounds, expected in ((2, None), (3, {"rounds": 3})):
        (started / "summary.json").write_text(json.dumps({"rounds": rounds}))
        assert finished(recipe(), started) == expected
    assert finished(recipe(), started / "elsewhere") is None


def test_capacities_that_clients_reported_replace_drawn_ones(tmp_path: Path) -> None:
    drawn = Capacities({1.0: 0.5, 0.5: 0.5})
    assert reported(drawn, tmp_path) is drawn
    for capacities, level in (({}, None), ({"0": 0.7, "1": 1.0}, 1)):
        (tmp_path / ENROLLED).write_text(json.dumps({"start": {"capacities": capacities}}))
        found = reported(drawn, tmp_path)
        assert (found is drawn) == (level is None)
    assert found.levels[found.assign(0, 4)[0]] == 0.5 and found.levels[found.assign(0, 4)[1]] == 1.0
