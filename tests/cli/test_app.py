"""The command line as a person meets it: real processes, their output and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.helpers import warm

fedfactor = warm.run


def test_help_names_the_commands() -> None:
    command = [sys.executable, "-c", "from fedfactor.cli import main; main()", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "tables" in done.stdout


def test_an_error_is_one_sentence_and_exit_code_2() -> None:
    done = fedfactor("tables", "--paper", "fedprox")
    assert done.returncode == 2
    assert "fedprox" in done.stderr and "fedpara" in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback() -> None:
    done = fedfactor("--debug", "tables", "--paper", "fedprox")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_an_unknown_option_is_exit_code_2() -> None:
    assert fedfactor("tables", "--papers", "x").returncode == 2


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
    assert {field["name"] for field in fedpara["fields"]} == {"dense", "gamma", "tanh", "jacobian"}
    assert all(field["help"] for row in rows for field in row["fields"])
    assert {kind for kind, _ in by_name} == {"method", "optimizer", "codec"}
    assert "fedpara" in fedfactor("methods").stdout
