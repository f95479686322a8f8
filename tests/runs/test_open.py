"""Run directories that are opened again: models, kept rounds, damaged files."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import torch

from fedfactor.runs import tasks
from fedfactor.runs.directory import RunError
from fedfactor.runs.execute import run
from fedfactor.runs.open import load
from fedfactor.server.store import Damaged
from tests.helpers.command import fedfactor_process
from tests.helpers.recipes import recipe
from tests.helpers.tiny import METHODS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever loads data fails."""

    def fail(**options: object) -> None:
        raise AssertionError("loaded data")

    monkeypatch.setattr(tasks, "load_data", fail)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run with private states and two rounds kept."""
    run(recipe("method.name=fedper", "optimizer.name=scaffold", "run.keep_rounds=[0, 2]"), tmp_path)
    return tmp_path


def test_models_open_without_the_data(finished: Path, request: pytest.FixtureRequest) -> None:
    expected = load(finished).result()
    request.getfixturevalue("no_data")
    opened = load(finished)
    x = torch.randn(4, 1, 8, 8)
    for ours, theirs in (
        (opened.model(), expected.model),
        (opened.model(capacity=1.0), expected.model),
        (opened.model(client=2), expected.client_model(2)),
    ):
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=0, atol=0)
    assert opened.task["classes"] == 10 and opened.task["clients"] == 6 and opened.task["input_shape"] == [1, 8, 8]
    assert opened.summary is not None and opened.summary["rounds"] == 3
    table = opened.table()
    assert table["round"] == [1, 2, 3] and len(table["totals.bytes_up"]) == 3


def test_a_folder_of_runs_opens_as_a_collection(tmp_path: Path) -> None:
    for name, lr in (("a/slow", 0.01), ("b", 0.1)):
        run(recipe("train.rounds=1", f"train.lr={lr}"), tmp_path / name)
    (tmp_path / "b" / "summary.json").unlink()  # this run is not finished
    runs = load(tmp_path)
    assert list(runs) == ["a/slow", "b"] and len(runs) == 2 and "slow" in repr(runs)
    assert runs["b"].recipe.training.lr == 0.1 and runs["a/slow"].model() is not None
    table = runs.table()
    assert (table["run"], table["method.name"], table["train.lr"]) == (["a/slow", "b"], ["fedavg"] * 2, [0.01, 0.1])
    assert table["final_accuracy"] == [runs["a/slow"].summary["final_accuracy"], None]
    assert "train.rounds" not in table  # the same in all runs


@pytest.mark.parametrize("method", METHODS)
def test_models_of_every_method_open_without_the_data(
    method: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    levels = ("capacities.levels=[1.0, 0.5]", "capacities.shares=[0.5, 0.5]", "run.keep_rounds=[1]")
    result = run(recipe(f"method.name={method}", "train.epochs=2", "train.rounds=2", *levels), tmp_path)
    request.getfixturevalue("no_data")
    x = torch.randn(4, 1, 8, 8)
    opened, kept = load(tmp_path), load(tmp_path, round=1)
    for level in (1.0, 0.5):
        torch.testing.assert_close(opened.model(level).eval()(x), result.model_at(level).eval()(x), rtol=0, atol=0)
    for client in range(3):  # sampled in no round, in one, in both
        ours, theirs = opened.model(client=client).eval(), result.client_model(client).eval()
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
        kept.model(client=client)


def test_statistics_of_norms_are_kept_with_the_round(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    method = ("method.name=heterofl", "method.static_norm=true", "evaluate.every=2", "run.keep_rounds=[1, 2]")
    result = run(recipe(*method, "capacities.levels=[1.0, 0.5]", "capacities.shares=[0.5, 0.5]"), tmp_path)
    request.getfixturevalue("no_data")
    x = torch.randn(4, 1, 8, 8)
    for level in (1.0, 0.5):
        ours, theirs = load(tmp_path).model(capacity=level).eval(), result.model_at(level).eval()
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    load(tmp_path, round=2).model(client=1)
    with pytest.raises(
        RunError, match=r"norm statistics at capacity 1 were not estimated in round 1; .* result\(data_dir\)"
    ):
        load(tmp_path, round=1).model()


def test_kept_rounds_are_what_the_run_was_then(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    shorter = tmp_path_factory.mktemp("shorter")
    settings = ("method.name=fedper", "optimizer.name=scaffold", "run.keep_rounds=[0, 2]", "train.rounds=2")
    run(recipe(*settings), shorter)
    kept, then = load(finished, round=2), load(shorter)
    assert load(finished).kept == [0, 2]
    assert kept.server().keys() == then.server().keys()
    for name, tensor in kept.server().items():
        assert torch.equal(tensor, then.server()[name])
    assert kept.clients() == then.clients() != []
    for client in kept.clients():
        ours, theirs = kept.private(client), then.private(client)
        assert set(ours) == {"kept", "optimizer"} and set(ours["kept"]) == {"fc.weight", "fc.bias"}
        assert all(torch.equal(ours[part][name], theirs[part][name]) for part in ours for name in ours[part])
    assert len(kept.metrics) == 3 and kept.table()["round"] == [1, 2]
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(kept.model(client=0).eval()(x), then.model(client=0).eval()(x))
    assert not torch.equal(kept.model(client=0).eval()(x), load(finished, round=0).model(client=0).eval()(x))
    start = load(finished, round=0)
    assert start.clients() == [] and start.private(0) == {} and len(start.metrics) == 1


def test_a_round_that_was_not_kept_names_those_that_were(
    finished: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(RunError, match=r"round 1 of .* was not kept; kept rounds: 0, 2"):
        load(finished, round=1)
    none = tmp_path_factory.mktemp("none")
    run(recipe("train.rounds=1"), none)
    with pytest.raises(RunError, match=r"round 1 of .* was not kept; kept rounds: none"):
        load(none, round=1)


def test_runs_are_compared_client_by_client(finished: Path) -> None:
    opened = load(finished)
    itself = opened.against(finished, measured="selected_after", when="last")
    assert itself["clients"] == itself["ties"] > 0 and opened.against(opened, measured="selected_after")["losers"] == []


def test_a_damaged_state_is_named(finished: Path) -> None:
    client = load(finished).clients()[0]
    (path,) = (finished / "checkpoint").glob(f"client/*/{client}.*")
    path.write_bytes(path.read_bytes()[:10])
    opened = load(finished)
    for use in (lambda: opened.private(client), lambda: opened.model(client=client)):
        with pytest.raises(
            Damaged, match=rf"client/.*/{client}\..* is damaged \(its SHA-256 is not the one in its name"
        ):
            use()
    opened.model()  # which does not read it
    with pytest.raises(Damaged, match=f"{client}\\..* is damaged"):
        run(opened.recipe, finished, resume=True)


def test_what_is_not_there_says_so(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no client 6: the run has 6, counted from 0"):
        load(finished).model(client=6)
    with pytest.raises(RunError, match=r"a capacity lies in \(0, 1\], got 2"):
        load(finished).model(capacity=2)
    with pytest.raises(RunError, match="is not a run directory and contains none"):
        load(tmp_path / "nowhere")
    started = tmp_path / "started"
    started.mkdir()
    (started / "recipe.toml").write_text(recipe().to_toml())
    with pytest.raises(RunError, match=r"has no task\.json: the run has not started yet"):
        load(started).model()
    with pytest.raises(RunError, match="has no committed round yet"):
        load(started).server()
    assert load(started).metrics == [] and load(started).summary is None


def test_a_running_run_opens_at_its_last_commit(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(recipe("train.rounds=400", "method.name=fedper", "evaluate.every=0").to_toml())
    out = tmp_path / "out"
    command = fedfactor_process("run", tmp_path / "tiny.toml", "--out", out)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "round 1/" in line:
                break
        until = time.monotonic() + 1.5
        seen = set()
        while time.monotonic() < until:
            opened = load(out)
            seen.add(len(opened.metrics))
            opened.server()
            for client in opened.clients():
                opened.private(client)
            opened.model(client=0)
        assert opened.summary is None
        process.kill()
    assert len(seen) > 1, "the run did not move on while it was read"
