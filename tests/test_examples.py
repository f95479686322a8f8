"""The examples run as they are and learn something."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LEARNT = {"segmentation": 0.8, "text": 0.8}
"""Figures of which more is better, and what an untrained model does not reach."""
ERRORS = {"regression": 55.0, "time_series": 0.15}
"""Figures of which less is better. The mean of all targets has an error of 65; the last value of a window, of 0.17."""

ELSEWHERE = {"plain_fedavg", "text_transformers"}
"""Examples that test_readme.py and tests/third_party run."""


@pytest.mark.parametrize("name", sorted(LEARNT | ERRORS))
def test_an_example_learns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    figure = float(capsys.readouterr().out.split()[-1])
    assert figure > LEARNT[name] if name in LEARNT else figure < ERRORS[name]


def test_examples_are_short_and_all_are_tried() -> None:
    lines = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lines.keys() == LEARNT.keys() | ERRORS.keys() | ELSEWHERE
    assert all(lines[name] <= 60 for name in lines.keys() - {"plain_fedavg"}), lines
