"""A model of transformers as clients train it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.third_party


def test_the_example_with_transformers_learns(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "text_transformers.py"
    runpy.run_path(str(example), run_name="__main__")
    assert float(capsys.readouterr().out.split()[-1]) > 0.9
