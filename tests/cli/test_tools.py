"""`fedfactor plan` and `export`; `fedfactor audit` is in `audit/test_audit.py`, with runs to attack."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedfactor.runs.execute import run
from fedfactor.runs.open import load
from fedfactor.server.accounting import Release, Spending
from tests.helpers.command import fedfactor
from tests.helpers.recipes import recipe


def test_the_command_writes_a_recipe_that_the_command_runs(tmp_path: Path) -> None:
    def call(*words: object) -> str:
        done = fedfactor(*words)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    devices = ("--device", "phone: 100 kB up, 1 MMAC, 1 MB", "--device", "gateway: 2 MB up, 40 %")
    out = call(
        "plan", "--model", "digits_cnn", "--input", "1x8x8", "--classes", 10, *devices, "--link", "2Mbps", "--rounds", 3,
        "--recipe", tmp_path / "planned.toml",
    )  # fmt: skip
    assert "phone: 100 kB up" in out and "Use " in out
    tables = tomllib.loads((tmp_path / "planned.toml").read_text())
    assert tables["data"]["name"] == "digits" and sum(tables["capacities"]["shares"]) == pytest.approx(1)
    small = ("--set", "train.rounds=2", "--set", "partition.clients=6", "--set", "train.cohort=3")
    call("run", tmp_path / "planned.toml", *small, "--out", tmp_path / "run", "--quiet")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--input", "1x9x9", "--recipe", "plan.toml"), "a recipe needs a data set"),
        (("--input", "1x8x8", "--recipe", "nowhere/plan.toml"), "the folder nowhere does not exist"),
    ],
)
def test_a_recipe_that_cannot_be_written_fails_before_the_work(
    words: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedfactor.advise.advise", lambda request: pytest.fail("this takes a minute"))
    done = fedfactor("plan", "--model", "digits_cnn", "--device", "pc: 1 GB", *words)
    assert done.exit_code == 2 and reason in done.stderr


def test_export_writes_a_model_and_says_how_to_load_it(tmp_path: Path) -> None:
    run(recipe("method.name=fedper", "train.rounds=1"), tmp_path / "run")
    out = tmp_path / "model.safetensors"
    done = fedfactor("export", tmp_path / "run", "-o", out, "--client", 2, "--without-data")
    assert done.exit_code == 0, done.stderr
    said = done.stdout.replace("\n", "")
    assert f"wrote {out}" in said and "accuracy" not in said
    assert torch.equal(load_file(out)["fc.bias"], load(tmp_path / "run").model(client=2).fc.bias)
    wrong = fedfactor("export", tmp_path / "run", "-o", tmp_path / "model.pickle")
    assert wrong.exit_code == 2 and ".safetensors" in wrong.stderr and not (tmp_path / "model.pickle").exists()


def test_plan_says_which_noise_an_epsilon_needs() -> None:
    asked = [
        "plan", "--model", "digits_cnn", "--input", "1x8x8", "--device", "phone: 2 MB up", "--methods", "fedavg",
        "--rounds", "2", "--epsilon", "8", "--clients", "100", "--cohorts", "50,1.0",
    ]  # fmt: skip
    found = json.loads(fedfactor(*asked, "--delta", "1e-4", "--json").stdout)["privacy"]
    half, everyone = found["rows"]
    assert (half["cohort"], everyone["cohort"]) == (50, 100) and half["noise"] < everyone["noise"]
    assert half["per_number"] == half["noise"] / 50 > everyone["per_number"]
    assert 7.9 < Spending(Release("poisson", 50, 100), half["noise"], 1e-4).after(2) <= 8
    assert "epsilon 8 at delta 0.0001" in fedfactor(*asked, "--delta", "1e-4").stdout


def test_an_epsilon_without_delta_fails_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfactor.advise.advise", lambda request: pytest.fail("this takes a minute"))
    words = ("plan", "--model", "digits_cnn", "--input", "1x8x8", "--device", "pc: 1 GB", "--epsilon", "8")
    done = fedfactor(*words)
    assert done.exit_code == 2 and "--epsilon needs a --delta above 0 and below 1 / 1,000" in done.stderr
