"""Runs of recipes: what a run directory contains, and what can be resumed."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedfactor.audit import Attack, audit
from fedfactor.export import export
from fedfactor.report import report
from fedfactor.runs import tasks
from fedfactor.runs.directory import RunError
from fedfactor.runs.execute import run
from fedfactor.runs.open import load
from fedfactor.runs.recipe import RecipeError, resolve
from fedfactor.server.store import Damaged, DiskStore
from tests.helpers.recipes import recipe
from tests.helpers.tiny import lasting

ROOT = Path(__file__).parents[2]

# What a run leaves behind.


def test_a_finished_run_has_everything(tmp_path: Path) -> None:
    result = run(recipe("method.name=fedper"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint", "lock", "metrics.jsonl", "recipe.toml", "summary.json", "task.json",
    ]  # fmt: skip
    assert resolve(tomllib.loads((tmp_path / "recipe.toml").read_text())) == recipe("method.name=fedper")
    summary = json.loads((tmp_path / "summary.json").read_text())
    wanted = {
        "final_accuracy", "best_accuracy", "rounds", "bytes_up", "bytes_down", "seconds", "weights_sha256",
        "private_sha256", "failures", "versions",
    }  # fmt: skip
    assert wanted <= set(summary)
    assert summary["rounds"] == 3 and summary["failures"] == 0
    assert summary == result.summary == load(tmp_path).summary
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "round", "round", "round"]
    assert summary["bytes_up"] == sum(event.get("bytes_up", 0) for event in events)
    assert summary["final_accuracy"] == events[-1]["selected_after"]["accuracy"]


def test_the_same_recipe_in_memory_ends_the_same(tmp_path: Path) -> None:
    assert lasting(run(recipe())) == lasting(run(recipe(), tmp_path))


# Carrying on.


def test_a_run_from_before_settings_were_renamed_resumes_once_its_recipe_is_edited(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(recipe(), tmp_path / "old", on_event=_stop_at_round(2))
    path = tmp_path / "old" / "recipe.toml"
    text, old = path.read_text(), {"batch_size": "batch", "max_grad_norm": "clip"}
    path.write_text(text.replace("batch_size", "batch").replace("max_grad_norm", "clip"))
    store = DiskStore(tmp_path / "old" / "checkpoint")
    server, info = store.last() or (b"", {})
    store.commit(2, [server], {**info, "settings": {old.get(key, key): v for key, v in info["settings"].items()}})
    before = contents(path.parent)
    renamed = r"recipe\.toml: train\.batch is now train\.batch_size; train\.clip is now train\.max_grad_norm"
    for use in (lambda: run(recipe(), path.parent, resume=True), lambda: load(path.parent)):
        with pytest.raises(RecipeError, match=renamed):
            use()
    assert contents(path.parent) == before
    path.write_text(text)
    resumed = run(recipe(), path.parent, resume=True)
    assert resumed.summary["weights_sha256"] == run(recipe()).summary["weights_sha256"]


def _stop_at_round(number: int) -> Callable[[dict[str, Any]], None]:
    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "committed" and event["round"] == number:
            raise KeyboardInterrupt

    return listen


def test_other_data_under_the_same_recipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(recipe("train.rounds=1"), tmp_path)
    honest = tasks.load_data

    def other(**options: Any) -> Any:
        found = honest(**options)
        return dataclasses.replace(found, train=(found.train[0], 9 - found.train[1]))

    monkeypatch.setattr(tasks, "load_data", other)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"clients was 6 .split .* and is now 6"):
        run(recipe("train.rounds=2"), tmp_path, resume=True)
    assert contents(tmp_path) == before


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_start_that_fails_leaves_the_directory_free(tmp_path: Path) -> None:
    for change in ("partition.clients=5000", "train.cohort=7", "model.name=os:getcwd", "model={name = 'mlp'}"):
        with pytest.raises((ValueError, RunError)):
            run(recipe(change), tmp_path)
        assert not (tmp_path / "checkpoint" / "current").exists()
    assert run(recipe(), tmp_path).summary["rounds"] == 3


def test_a_last_line_cut_short_is_cut_off(tmp_path: Path) -> None:
    whole = lasting(run(recipe(), tmp_path / "whole"))
    directory = tmp_path / "cut"
    run(recipe(), directory)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"event": "rou')
    assert len(load(directory).metrics) == 4
    assert lasting(run(recipe(), directory, resume=True)) == whole
    assert (directory / "metrics.jsonl").read_text().endswith("}\n")


# Devices.


def test_a_device_that_is_not_here_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"device 'cuda:99' cannot be used here \(.*\); cpu always can"):
        run(recipe("train.device=cuda:99", "data={name = 'cifar10'}"), tmp_path / "out", data_dir=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


def test_a_run_of_a_device_that_is_not_here_still_opens(tmp_path: Path) -> None:
    run(recipe("train.rounds=1"), tmp_path)
    path = tmp_path / "recipe.toml"
    path.write_text(path.read_text().replace('device = "cpu"', 'device = "cuda"'))
    assert load(tmp_path).recipe.training.device == "cuda"
    assert next(load(tmp_path).model().parameters()).device.type == "cpu"


# Extending.


def test_a_finished_run_is_extended_to_the_bits_of_a_longer_one(tmp_path: Path) -> None:
    settings = ("method.name=fedper", "optimizer.name=scaffold", "train.schedule={kind = 'exponential', decay = 0.5}")
    run(recipe(*settings, "train.rounds=2"), tmp_path)
    seen = []

    def listen(event: dict[str, Any]) -> None:
        seen.append((event["event"], load(tmp_path).summary is None))

    longer = recipe(*settings, "train.rounds=4", "run.keep_rounds=[2, 3]")
    extended = run(longer, tmp_path, resume=True, on_event=listen)
    assert seen[0] == ("resumed", True), "the summary of the shorter run is gone"
    assert lasting(extended) == lasting(run(longer))
    assert load(tmp_path).recipe == longer and load(tmp_path).kept == [2, 3]
    with pytest.raises(RunError, match=r"run\.keep_rounds: .* has passed \[1\] without keeping them"):
        run(recipe(*settings, "train.rounds=5", "run.keep_rounds=[1, 2, 3]"), tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"4 rounds are committed, more than train\.rounds = 3"):
        run(recipe(*settings, "train.rounds=3"), tmp_path, resume=True)
    assert load(tmp_path).recipe == longer


def test_what_is_measured_may_change(tmp_path: Path) -> None:
    run(recipe("train.rounds=1", "evaluate.clients=none"), tmp_path)
    changed = ("evaluate.clients=all", "evaluate.target=0.0", "evaluate.limit=2", "train.quorum=0.1")
    result = run(recipe("train.rounds=2", *changed), tmp_path, resume=True)
    assert ["all" in event for event in result.history] == [False, False, True]
    assert result.summary["all"]["reached"]["round"] == 2 and "all: accuracy" in str(result)
    assert result.summary["weights_sha256"] == run(recipe("train.rounds=2")).summary["weights_sha256"]


def test_a_schedule_that_depends_on_the_length_is_not_extended(tmp_path: Path) -> None:
    run(recipe("train.rounds=1", "train.schedule=cosine"), tmp_path)
    with pytest.raises(RunError, match=r"train\.rounds was 1 and is now 2 \(the schedule depends on it\)"):
        run(recipe("train.rounds=2", "train.schedule=cosine"), tmp_path, resume=True)


# Damage, and full disks.


@pytest.mark.parametrize("file", ["checkpoint/round-1/server.safetensors", "checkpoint/round-1/info.json"])
def test_a_checkpoint_with_one_other_byte_is_refused_by_everything_that_loads_it(file: str, tmp_path: Path) -> None:
    run(recipe("train.rounds=1", "run.keep_rounds=[1]"), tmp_path)
    path = tmp_path / file
    path.unlink()  # the kept round is a hard link
    data = (tmp_path / "kept" / "round-1" / path.relative_to(tmp_path / "checkpoint")).read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    before = contents(tmp_path)
    for use in (
        lambda: run(recipe("train.rounds=1", "run.keep_rounds=[1]"), tmp_path, resume=True),
        lambda: run(recipe("train.rounds=2", "run.keep_rounds=[1]"), tmp_path, resume=True),
        lambda: load(tmp_path),
        lambda: report([tmp_path], tmp_path / "report.html"),
        lambda: export(tmp_path, tmp_path / "model.pt2"),
        lambda: audit(tmp_path, Attack(iterations=1)),
    ):
        with pytest.raises(Damaged, match=f"{file} is damaged .*: restore it from a backup"):
            use()
    assert contents(tmp_path) == before
    assert len(load(tmp_path, round=1).server()) > 0


def test_the_recorded_hash_is_not_overwritten(tmp_path: Path) -> None:
    run(recipe("train.rounds=1"), tmp_path)
    path = tmp_path / "summary.json"
    text = path.read_text()
    recorded = load(tmp_path).summary
    assert recorded is not None
    path.write_text(text.replace(recorded["weights_sha256"], 64 * "0"))
    with pytest.raises(Damaged, match=r"summary\.json is damaged \(its weights_sha256 is not that of the checkpoint"):
        run(recipe("train.rounds=1"), tmp_path, resume=True)
    assert 64 * "0" in path.read_text()
    path.write_text(text[:-10])
    with pytest.raises(Damaged, match=r"summary\.json is damaged"):
        run(recipe("train.rounds=1"), tmp_path, resume=True)


def test_a_full_disk_is_named_and_the_run_resumes(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint" / "round-2" / "server.safetensors"

    def fill(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 2:
            file.parent.mkdir()
            file.symlink_to("/dev/full")

    with pytest.raises(OSError, match=f"No space left on device: '{file}'"):
        run(recipe("method.name=fedper"), tmp_path, on_event=fill)
    file.unlink()
    resumed = run(recipe("method.name=fedper"), tmp_path, resume=True)
    assert lasting(resumed) == lasting(run(recipe("method.name=fedper")))
