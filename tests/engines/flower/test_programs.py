"""Flower's programs: their environment, how they start, end and are restarted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedfactor.engines.flower.programs import DeploymentError, Program, RestartingProgram, environment, until


def test_flowers_programs_report_to_nobody_and_write_where_they_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = environment(tmp_path)
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert found["FLWR_HOME"] == found["TMPDIR"] == str(tmp_path)
    assert "127.0.0.1" in found["NO_PROXY"]
    monkeypatch.chdir(tmp_path)  # where a recipe's own modules may be
    assert environment(tmp_path)["PYTHONPATH"].endswith(str(tmp_path))


def test_waiting_ends() -> None:
    with pytest.raises(DeploymentError, match=r"tea took more than 0\.2 seconds"):
        until(lambda: False, 0.2, "tea")


def test_what_ends_is_started_again_after_pauses_that_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fedfactor.engines.flower.programs.time.monotonic", lambda: now[0])
    one = RestartingProgram(
        "one", lambda: [sys.executable, "-S", "-c", "raise SystemExit(7)"], tmp_path, tmp_path / "log"
    )
    pauses = []
    for _ in range(6):
        assert one.program is not None
        assert one.program.wait(30) == 7
        one.poll()  # sees the end
        before, starts = now[0], one.starts
        while one.starts == starts:
            now[0] += 0.5
            one.poll()
        pauses.append(now[0] - before)
    assert one.program is not None
    one.program.stop()
    assert pauses == [4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_program_that_is_not_there_says_so(tmp_path: Path) -> None:
    program = Program("none", [str(tmp_path / "nothing")], tmp_path, tmp_path / "log")
    assert program.wait(30) == 127
    assert "cannot start" in program.log_tail()
    program.stop()
