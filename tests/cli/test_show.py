"""`fedfactor tables`, `methods` and `data show`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedfactor.cli.common import console, tell
from tests.helpers.command import fedfactor


def test_tables_as_json_and_as_text() -> None:
    rows = json.loads(fedfactor("tables", "--paper", "feddecomp", "--json").stdout)
    fields = {"paper", "table", "row", "quantity", "ours", "printed", "relative_error", "verdict", "note"}
    assert rows and all(set(row) == fields for row in rows)
    assert "feddecomp" in fedfactor("tables", "--paper", "feddecomp").stdout.lower()


def test_methods_lists_everything_with_paper_and_fields() -> None:
    rows = json.loads(fedfactor("methods", "--json").stdout)
    by_name = {(row["kind"], row["name"]): row for row in rows}
    fedpara = by_name["method", "fedpara"]
    assert fedpara["paper"] == "arXiv:2108.06098"
    assert {field["name"] for field in fedpara["fields"]} == {"dense", "gamma", "rank", "tanh", "jacobian", "start"}
    assert all(field["help"] for row in rows for field in row["fields"])
    assert {kind for kind, _ in by_name} == {"method", "optimizer", "codec"}
    assert "fedpara" in fedfactor("methods").stdout


def test_data_show_draws_who_has_what(tmp_path: Path) -> None:
    path = tmp_path / "shown.toml"
    path.write_text('data = { name = "digits" }\nmodel = { name = "digits_cnn" }\n')
    done = fedfactor("data", "show", path, "--set", 'partition={kind="dirichlet", clients=5, alpha=0.2}')
    assert done.exit_code == 0, done.stderr
    assert "digits: 1,438 train" in done.stdout and "●" in done.stdout


def test_names_are_not_turned_into_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    tell("mine:one: 60 train examples")
    console.print("mine:one: 60 train examples")
    assert capsys.readouterr().out == "mine:one: 60 train examples\n" * 2


def test_data_show_reads_datasets_and_says_what_identifies_them(tmp_path: Path) -> None:
    path = tmp_path / "shown.toml"
    path.write_text(
        'data = { name = "tests.helpers.sequences:owners" }\nmodel = { name = "tests.helpers.sequences:Bag" }\n'
        'partition = { kind = "natural" }\n'
    )
    done = fedfactor("data", "show", path)
    assert done.exit_code == 0, done.stderr
    assert "86 train and 60 test examples, 2 classes, 4 natural owners" in done.stdout
    assert "identified by a sample of 64 of 86 examples" in " ".join(done.stdout.split())
    assert "few" in done.stdout and "4 clients with 20 to 23 examples" in done.stdout
    path.write_text(
        'data = { name = "tests.helpers.sequences:positions" }\nmodel = { name = "tests.helpers.sequences:Bag" }\n'
    )
    done = fedfactor("data", "show", path, "--set", "partition.clients=2")
    assert done.exit_code == 0 and "one class per example is needed" in " ".join(done.stdout.split())
    done = fedfactor("data", "show", path, "--set", "partition.clients=2", "--set", "objective.kind=regression")
    assert done.exit_code == 0 and "one class" not in done.stdout and "2 clients with" in done.stdout
