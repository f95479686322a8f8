"""`fedfactor run`: finished, killed, interrupted, resumed and refused."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedfactor.server.store import DiskStore
from tests.helpers.command import fedfactor as call
from tests.helpers.command import fedfactor_process as command

RECIPE = """
[data]
name = "digits"
[partition]
kind = "iid"
clients = 6
[model]
name = "digits_cnn"
width = 0.125
[train]
rounds = 4
cohort = 3
epochs = 2
batch_size = 64
lr = 0.05
[capacities]
levels = [1.0, 0.5]
shares = [0.5, 0.5]
"""


def recipe(folder: Path, method: str = "fedavg", text: str = "") -> Path:
    path = folder / "recipe-given.toml"
    path.write_text(RECIPE + f'[method]\nname = "{method}"\n' + text)
    return path


def comparable(directory: Path) -> tuple[Any, list[Any]]:
    summary = json.loads((directory / "summary.json").read_text())
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    timeless = [{k: v for k, v in event.items() if "seconds" not in k} for event in events]
    return {k: v for k, v in summary.items() if k != "seconds"}, timeless


def test_killed_and_resumed_through_the_command_line(tmp_path: Path) -> None:
    path = recipe(tmp_path, "pfedpara")  # all methods: conformance/test_resume.py
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = call("run", path, "--out", whole, "--quiet")
    assert done.exit_code == 0, done.stderr
    with subprocess.Popen(command("run", path, "--out", cut), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "round 2/4" in line:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    assert not (cut / "summary.json").exists()
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"event": "cut sho')
    done = call("run", path, "--out", cut, "--resume", "--quiet")
    assert done.exit_code == 0, done.stderr
    assert comparable(cut) == comparable(whole)


@pytest.mark.parametrize("engine", ["inline", "pool"])
def test_ctrl_c_stops_at_a_commit_and_prints_the_command_that_carries_on(engine: str, tmp_path: Path) -> None:
    path, out = recipe(tmp_path, "pfedpara"), tmp_path / "out put"
    words = ["run", path, "--out", out, "--set", "train.rounds=12", "--engine", engine]
    words += ["--workers", 2] if engine == "pool" else []
    # A group of its own: as from a terminal, the signal reaches the workers too.
    with subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if "round 2/12" in line:
                os.killpg(process.pid, signal.SIGINT)
                break
        said, complaint = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    last = DiskStore(out / "checkpoint", writing=False).last()
    rounds = len((out / "metrics.jsonl").read_text().splitlines()) - 1
    assert last is not None and last[1]["round"] == rounds >= 2  # nothing that was noted is lost
    assert "stopping when this round is committed" in said and "failed" not in said
    assert f"holds everything up to round {rounds}. Resume with:" in complaint and "Traceback" not in complaint
    again = shlex.split(complaint.splitlines()[-1])
    assert again == ["fedfactor", *map(str, words), "--resume"]
    done = call(*again[1:], "--quiet")
    assert done.exit_code == 0, done.stderr
    assert json.loads((out / "summary.json").read_text())["rounds"] == 12


def test_a_run_directory_holds_what_it_should(tmp_path: Path) -> None:
    path, out = recipe(tmp_path, "pfedpara", "[run]\nkeep_rounds = [2]\n"), tmp_path / "out"
    done = call("run", path, "--out", out)
    assert done.exit_code == 0, done.stderr
    assert "round 4/4" in done.stdout and f"next: fedfactor report {out}" in done.stdout
    assert "ratio" not in done.stdout  # there is no other run to compare with
    summary = json.loads((out / "summary.json").read_text())
    wanted = {"final_accuracy", "best_accuracy", "rounds", "bytes_up", "bytes_down", "seconds", "failures", "versions"}
    assert wanted | {"weights_sha256", "private_sha256"} <= set(summary)
    assert summary["rounds"] == 4
    resolved = (out / "recipe.toml").read_text()
    assert "quorum = 0.5" in resolved and "min_examples" not in resolved and "gamma = 0.5" in resolved
    kept = DiskStore(out / "kept" / "round-2", writing=False)
    last = kept.last()
    assert last is not None and last[1]["round"] == 2 and kept.clients("client")
    assert kept.read("client", kept.clients("client")[0])


def test_what_is_there_is_not_overwritten_and_a_changed_recipe_is_refused(tmp_path: Path) -> None:
    path, out = recipe(tmp_path), tmp_path / "out"
    assert call("run", path, "--out", out, "--set", "train.rounds=1", "--quiet").exit_code == 0
    again = call("run", path, "--out", out, "--set", "train.rounds=1")
    assert again.exit_code == 2 and "holds a run already" in again.stderr and "--resume" in again.stderr
    changed = call("run", path, "--out", out, "--resume", "--set", "train.rounds=1", "--set", "train.lr=0.1")
    assert changed.exit_code == 2 and "train.lr was 0.05 and is now 0.1" in changed.stderr
    assert "Traceback" not in again.stderr + changed.stderr


def test_a_sweep_runs_its_cells_and_only_those_asked_for(tmp_path: Path) -> None:
    text = '[[sweep.cases]]\nname = "a"\n[[sweep.cases]]\nname = "b"\ncodec = { name = "fedpaq" }\n'
    path, out = recipe(tmp_path, text=text), tmp_path / "out"
    done = call("run", path, "--out", out, "--set", "train.rounds=1", "--only", "b")
    assert done.exit_code == 0, done.stderr
    assert [p.name for p in out.iterdir()] == ["b"]
    none = call("run", path, "--out", out, "--only", "c")
    assert none.exit_code == 2 and "its cells are a, b" in none.stderr


def test_a_sweep_made_by_overrides_has_one_directory_per_cell(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = call("run", recipe(tmp_path), "--out", out, "--set", "train.rounds=1", "--set", "sweep.seed=[0,1]", "--csv")
    assert done.exit_code == 0, done.stderr
    assert sorted(p.name for p in out.iterdir()) == ["seed=0", "seed=1"]
    assert len(done.stdout.splitlines()) == 2, "one line for both seeds, below the header"


def test_the_pool_ends_with_the_same_hashes(tmp_path: Path) -> None:
    path = recipe(tmp_path, "pfedpara")
    for name, words in {"inline": [], "pool": ["--engine", "pool", "--workers", 2]}.items():
        done = call("run", path, "--out", tmp_path / name, "--quiet", "--set", "train.rounds=2", *words)
        assert done.exit_code == 0, done.stderr
    assert comparable(tmp_path / "inline") == comparable(tmp_path / "pool")
    wrong = call("run", path, "--engine", "poll")
    assert wrong.exit_code == 2 and "choose one of inline, pool, flower-local, flower-ray" in wrong.stderr


def test_overrides_reach_every_cell(tmp_path: Path) -> None:
    path = recipe(tmp_path, text='[[sweep.cases]]\nname = "a"\nmethod = { name = "fedpara", gamma = 0.1 }\n')
    done = call("run", path, "--out", tmp_path / "o", "--set", "train.rounds=1", "--set", "method.gamma=0.5", "--quiet")
    assert done.exit_code == 0, done.stderr
    assert "gamma = 0.5" in (tmp_path / "o" / "a" / "recipe.toml").read_text()


def test_a_missing_data_set_says_where_and_how(tmp_path: Path) -> None:
    done = call("run", recipe(tmp_path), "--set", "data.name=cifar10", "--data-dir", tmp_path, "--out", tmp_path / "o")
    assert done.exit_code == 2
    assert str(tmp_path) in done.stderr.replace("\n", "") and "cifar-10-binary" in done.stderr
