"""`fedfactor flower app` and what it says when it cannot."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedfactor.cli.main import app
from fedfactor.runs.flower.app import write_app
from tests.helpers.grid import Deployment, recipe


def test_the_command_writes_an_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(recipe("fedpara").to_toml())
    words = [
        "flower",
        "app",
        "mine.toml",
        "out",
        "--set",
        "train.rounds=7",
        "--config",
        "data=nodes",
        "--config",
        "deadline=9",
    ]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and "flwr run out" in done.stdout
    config = tomllib.loads(Path("out/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config["data"] == "nodes" and config["deadline"] == 9.0
    assert config["run-dir"] == str(tmp_path / "runs" / "flower")
    assert tomllib.loads(config["recipe"])["train"]["rounds"] == 7


def test_of_a_sweep_one_cell_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweep.toml").write_text(recipe("fedpara").to_toml() + "\n[sweep]\n'train.lr' = [0.1, 0.2]\n")
    done = CliRunner().invoke(app, ["flower", "app", "sweep.toml", "out"])
    assert done.exit_code == 2 and "2 cells of sweep.toml match '*': lr=0.1, lr=0.2" in done.stderr
    CliRunner().invoke(app, ["flower", "app", "sweep.toml", "out", "--only", "*0.2"], catch_exceptions=False)
    config = tomllib.loads(Path("out/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert tomllib.loads(config["recipe"])["train"]["lr"] == 0.2
    assert config["run-dir"] == str(tmp_path / "runs" / "flower" / "lr=0.2")


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no setting 'dedline'; did you mean 'deadline'"):
        write_app(recipe(), tmp_path, tmp_path, config={"dedline": 5})
    with pytest.raises(ValueError, match="deadline should be a float, got 'soon'"):
        write_app(recipe(), tmp_path, tmp_path, config={"deadline": "soon"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run-dir": "runs/x"}, "run-dir must be an absolute path"),
        ({"data": "clouds"}, "data must be one of recipe, nodes"),
        ({"identity": "face"}, "identity must be one of config, key"),
        ({"lost-state": "cry"}, "lost-state must be one of fail, restart"),
        ({"deadline": -1.0}, "deadline must be a positive number of seconds"),
        ({"recipe": "seed = "}, "the run's recipe is not TOML"),
    ],
)
def test_a_run_that_cannot_be_says_why(changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, recipe())
    with pytest.raises(ValueError, match=reason):
        deployed.serve(**changes)
