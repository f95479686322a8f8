"""Runs of recipes: what a run directory contains, and what can be resumed."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedfactor.runs import tasks
from fedfactor.runs.directory import RunError
from fedfactor.runs.execute import run
from fedfactor.runs.open import load
from fedfactor.runs.recipe import RecipeError, resolve
from tests.helpers.recipes import recipe

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
    assert summary["weights_sha256"] == result.summary["weights_sha256"]
    assert summary["private_sha256"] == result.summary["private_sha256"]
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "round", "round", "round"]
    assert summary["bytes_up"] == sum(event.get("bytes_up", 0) for event in events)
    assert summary["final_accuracy"] == events[-1]["selected_after"]["accuracy"]


def test_the_same_recipe_in_memory_ends_the_same(tmp_path: Path) -> None:
    assert run(recipe()).summary == run(recipe(), tmp_path).summary


# Carrying on.


def test_a_run_from_before_settings_were_renamed_resumes_once_its_recipe_is_edited(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(recipe(), tmp_path / "old", on_event=_stop_at_round(2))
    path = tmp_path / "old" / "recipe.toml"
    text, old = path.read_text(), {"batch_size": "batch", "max_grad_norm": "clip"}
    path.write_text(text.replace("batch_size", "batch").replace("max_grad_norm", "clip"))
    committed = tmp_path / "old" / "checkpoint" / "current"
    info = committed.parent / committed.read_text() / "info.json"
    state = json.loads(info.read_text())
    state["settings"] = {old.get(key, key): value for key, value in state["settings"].items()}
    info.write_text(json.dumps(state))
    before = sorted((file, file.read_bytes()) for file in path.parent.rglob("*") if file.is_file())
    renamed = r"recipe\.toml: train\.batch is now train\.batch_size; train\.clip is now train\.max_grad_norm"
    for use in (lambda: run(recipe(), path.parent, resume=True), lambda: load(path.parent)):
        with pytest.raises(RecipeError, match=renamed):
            use()
    assert sorted((file, file.read_bytes()) for file in path.parent.rglob("*") if file.is_file()) == before
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
    with pytest.raises(ValueError, match=r"clients was 6 .split .* and is now 6"):
        run(recipe("train.rounds=1"), tmp_path, resume=True)


def test_a_start_that_fails_leaves_the_directory_free(tmp_path: Path) -> None:
    for change in ("partition.clients=5000", "train.cohort=7", "model.name=os:getcwd", "model={name = 'mlp'}"):
        with pytest.raises((ValueError, RunError)):
            run(recipe(change), tmp_path)
        assert not (tmp_path / "checkpoint" / "current").exists()
    assert run(recipe(), tmp_path).summary["rounds"] == 3


def test_a_last_line_cut_short_is_cut_off(tmp_path: Path) -> None:
    whole = run(recipe(), tmp_path / "whole").summary
    directory = tmp_path / "cut"
    run(recipe(), directory)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"event": "rou')
    assert len(load(directory).metrics) == 4
    assert run(recipe(), directory, resume=True).summary == whole
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
