"""The result of a run: its models, its summary, and how it prints."""

from __future__ import annotations

from tests.helpers.tiny import run


def test_the_result_prints_what_it_measured_and_how() -> None:
    text = str(run(rounds=1))
    for part in ("global", "selected_after", "own test data", "bytes up"):
        assert part in text
