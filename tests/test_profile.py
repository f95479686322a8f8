"""Where the time goes: own times by hand, columns that add up, traces that open, the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedfactor import profile
from fedfactor.cli.main import app
from fedfactor.engines import Pool
from fedfactor.profile import NAMES, Track, current, recording, span, timed
from fedfactor.runs.open import load
from tests.helpers.tiny import lasting, run


def test_own_times_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training from 1 to 11 with composing from 2 to 5 and from 7 to 8 inside: 6 and 4 seconds; the rest of 20 is 10."""
    ticks = iter([0.0, 1.0, 2.0, 5.0, 7.0, 8.0, 11.0, 20.0])
    monkeypatch.setattr(profile, "perf_counter", lambda: next(ticks))
    with recording() as recorder, span("training"):
        for _ in range(2):
            with span("composing"):
                pass
    assert recorder.wall == 20.0
    found = {name: seconds for name, (seconds, _) in recorder.rows().items() if seconds}
    assert found == {"training": 6.0, "composing": 4.0, "the rest": 10.0}
    assert recorder.mine.spans == [("composing", 2.0, 3.0), ("composing", 7.0, 1.0), ("training", 1.0, 10.0)]
    recorder.absorb(0, Track([("training", 1.0, 8.0)], {"training": 8.0}))
    recorder.absorb(1, Track([("training", 1.0, 3.0)], {"training": 3.0}))
    recorder.absorb(1, Track([("training", 9.0, 1.0)], {"training": 1.0}))
    assert recorder.rows()["training"] == (6.0, 6.0)
    assert recorder.rows()["waiting"] == (0.0, 14.0)


def test_nothing_is_kept_when_nobody_records() -> None:
    assert current() is None
    assert span("training") is span("waiting")

    @timed("training")
    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    assert double(4) == 8 and double.__doc__ == "Twice."
    with pytest.raises(RuntimeError, match="inside"), recording() as recorder:
        double(1)
        raise RuntimeError("inside")
    assert current() is None and [name for name, _, _ in recorder.mine.spans] == ["training"]


def test_a_long_run_keeps_its_table_and_the_beginning_of_its_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(profile, "MOST_SPANS", 5)
    with recording() as recorder:
        for _ in range(8):
            with span("encoding"):
                pass
    recorder.absorb(0, Track([("training", 0.0, 1.0)] * 4, {"training": 4.0}))
    recorder.absorb(0, Track([("training", 0.0, 1.0)] * 4, {"training": 4.0}))
    recorder.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert len([event for event in trace["traceEvents"] if event["ph"] == "X"]) == 5 + 5
    assert trace["otherData"] == {"spans left out": 3 + 3}
    assert recorder.workers[0].seconds == {"training": 8.0}


@pytest.mark.parametrize("engine", ["inline", "pool"])
def test_the_command_shows_where_time_went(engine: str, tmp_path: Path) -> None:
    recipe = Path(__file__).parents[1] / "src" / "fedfactor" / "recipes" / "demo.toml"
    asked = ["run", str(recipe), "--set", "train.rounds=2", "--only", "fedpara", "--engine", engine]
    asked += ["--workers", "2"] if engine == "pool" else []
    plain = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "plain"), "--quiet"])
    found = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "seen"), "--profile"])
    assert plain.exit_code == 0 and found.exit_code == 0, (plain.exception, found.exception)
    here, there = (load(tmp_path / name / "fedpara").summary for name in ("seen", "plain"))
    assert here is not None and there is not None and here["weights_sha256"] == there["weights_sha256"]
    assert not (tmp_path / "plain" / "fedpara" / "trace.json").exists()
    for name in (*NAMES, "all"):
        assert f" {name} " in found.stdout
    trace = json.loads((tmp_path / "seen" / "fedpara" / "trace.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in trace if event["ph"] == "M"}
    assert tracks == ({0: "server"} if engine == "inline" else {0: "server", 1: "worker 1", 2: "worker 2"})
    where = {name: {event["tid"] for event in trace if event["name"] == name} for name in NAMES}
    workers = {0} if engine == "inline" else {1, 2}
    assert where["training"] == where["composing"] - ({0} if engine == "pool" else set()) == workers
    assert where["server algebra"] == where["committing"] == {0}
    assert where["waiting"] == (set() if engine == "inline" else {0})
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in trace if event["ph"] == "X")


def test_columns_add_up_to_the_wall_time() -> None:
    def columns(recorder: Any) -> list[float]:
        return [sum(part) for part in zip(*recorder.rows().values(), strict=True) if part[0] is not None]

    with recording() as inline:
        expected = run("fedpara")
    assert columns(inline) == pytest.approx([inline.wall])
    with Pool(2) as pool, recording() as pooled:
        found = run("fedpara", engine=pool)
    assert columns(pooled) == pytest.approx([pooled.wall] * 2)
    assert lasting(found) == lasting(expected)
    for rows in (inline.rows(), pooled.rows()):
        assert all(seconds >= 0 for row in rows.values() for seconds in row if seconds is not None)
