"""Flower's simulation engine, with the real Ray: the same bits, and nothing left behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from fedfactor.runs.flower.local import run_local
from tests.helpers.deployment import HASHES, inline, own_processes, recipe

pytestmark = pytest.mark.ray


def leftovers() -> set[Path]:
    """Return what Ray could leave behind: folders of its own, and shared memory."""
    return {*Path(tempfile.gettempdir()).glob("ray*"), *Path("/dev/shm").glob("*")}


def test_the_same_bits_as_in_one_process_and_nothing_is_left(tmp_path: Path) -> None:
    one, told, before = recipe("feddecomp", rounds=3), list[str](), (own_processes(), leftovers())
    found = run_local(one, tmp_path / "run", simulation=True, on_event=lambda event: told.append(event["event"]))
    expected = inline(one)
    assert {key: found[key] for key in HASHES} == {key: expected[key] for key in HASHES}
    assert [event for event in told if event != "committed"] == ["start", "round", "round", "round"]
    assert told[-1] == "committed", "rounds are quicker than looks at them: some are told together"
    assert (own_processes(), leftovers()) == before
    assert not (tmp_path / "run" / "flower").exists()
