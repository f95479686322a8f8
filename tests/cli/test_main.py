"""The command line as its user meets it: output and exit codes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import fedfactor as package
from tests.helpers.command import fedfactor, fedfactor_process

HEAVY = ("torch", "numpy", "flwr", "plotly", "pydantic")


def test_help_names_the_commands_and_starts_without_torch() -> None:
    code = (
        f"import sys\nfrom fedfactor.cli import main\ntry:\n    main()\n"
        f"finally:\n    print('imported', sorted(set(sys.modules) & set({HEAVY})), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert all(
        name in done.stdout for name in ("run", "compare", "report", "plan", "export", "audit", "tables", "flower")
    )
    assert done.stderr == "imported []\n"


def test_an_error_is_one_sentence_and_exit_code_2() -> None:
    done = subprocess.run(
        fedfactor_process("tables", "--paper", "fedprox"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "fedprox" in done.stderr and "fedpara" in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback() -> None:
    found = fedfactor("--debug", "tables", "--paper", "fedprox")
    assert found.exit_code != 0 and type(found.exception) is ValueError and found.stderr == ""


def test_an_unknown_option_is_exit_code_2() -> None:
    found = fedfactor("tables", "--papers", "x")
    assert found.exit_code == 2 and re.search("No such option:? .?--papers", found.stderr)


def test_the_version() -> None:
    assert fedfactor("--version").stdout == f"{package.__version__}\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["compare", "x.toml", "--methods", "fedavg", "-o", "o", "--seeds", "1,b"], "--seeds takes numbers separated by"),
        (["plan", "--model", "digits_cnn", "--device", "a: 1 GB", "--capacities", "all"], "--capacities takes numbers"),
        (["audit", "o", "--rounds", "last"], "--rounds takes numbers separated by commas, such as 10,20,30, got 'last'"),
        (["run", "x.toml", "--workers", "2"], "--workers needs --engine pool"),
        (["run", "demo", "--engine", "pool", "--workers", "-1"], "-1 is not in the range"),
        (["run", "x.toml", "--engine", "flower-local", "--profile"], "--profile needs --engine inline or pool"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(words: list[str], sentence: str) -> None:
    found = fedfactor(*words)
    assert found.exit_code == 2 and sentence in found.stderr
