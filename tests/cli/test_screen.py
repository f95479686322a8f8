"""What a terminal shows of a run: figures worked out by hand from made-up events."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from fedfactor.cli.screen import Progress, Watched, bars, clock, in_bytes, line, results, traffic
from fedfactor.task import LOSS
from tests.helpers.events import round_event


def answered(number: int, failure: str | None = None) -> dict[str, Any]:
    return {"event": "answered", "round": number, "client": 1, "failure": failure, "of": 4}


def shown(run: Watched) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    console.print(run.panel())
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def watched() -> Watched:
    run = Watched("demo", rounds=5)
    for event in [
        {"event": "start", "dense_bytes": 2000},
        answered(1),
        round_event(1, 0.50),
        round_event(2, 0.75),
        round_event(3, 0.70, seconds=40.0),
    ]:
        run.hear(event)
    return run


def test_the_live_screen_has_round_accuracy_trend_traffic_clients_and_time_left() -> None:
    text = shown(watched())
    assert "3/5" in text
    assert "0.700 ▼ -0.050 in round 3, best 0.750 in round 2  ▁█▇" in text  # 0.70 is 0.8 of the way: bar 6 of 0 to 7
    assert "6.0 kB, dense FedAvg 24.0 kB (4.0x)" in text  # 3 rounds of 4 clients at 2000 bytes
    assert "0:00:40 left" in text  # two rounds at the mean of 10, 10 and 40 seconds
    assert "round 3: 4 of 4 done, 0 failed" in text


def test_a_buffered_round_shows_the_replies_that_it_used_whenever_their_clients_started() -> None:
    run, lost = watched(), [{"client": 7, "reason": "did not answer"}]
    run.hear({**round_event(4, 0.7), "cohort": [], "failures": lost, "buffered": {"clients": [1, 2], "ages": [0, 3]}})
    assert "round 4: 2 replies used, 1 failed" in shown(run)


def test_a_falling_error_is_shown_as_better() -> None:
    run = Watched("prices", rounds=3)
    run.hear({"event": "start", "metric": {"name": "mae", "higher_is_better": False}})
    for number, error in ((1, 31.25), (2, 12.5)):
        run.hear({**round_event(number, 0.0), "global": {"1": {"mae": error, "loss": 1.0}}})
    assert "12.5 ▼ -18.8 in round 2, best 12.5 in round 2" in shown(run) and "mae" in shown(run)
    assert any(str(span.style) == "green" for span in run._score().spans)
    assert "mae 12.5 at 1" in line(run.last, decider=run.decider) and "mae 12.5, " in run.closing().plain
    assert "training loss 0.500, test loss 2 at 1" in line({**run.last, "global": {"1": {"loss": 2.0}}}, decider=LOSS)
    summaries = {
        name: {**run.last["totals"], "seconds": 1, "metric": {"name": metric, "higher_is_better": False}, **scores}
        for name, metric, scores in (
            ("a", "mae", {"final_mae": 12.5, "best_mae": 9.0, "mae_of": "global"}),
            ("b", "loss", {"final_loss": 0.25, "best_loss": None, "loss_of": "all"}),
        )
    }
    one, both = (Console(file=io.StringIO(), width=120) for _ in range(2))
    one.print(results({"a": summaries["a"]}, {"a": {}}))
    both.print(results(summaries, {"a": {}, "b": {}}))
    assert "mae" in one.file.getvalue() and " 12.5 " in one.file.getvalue()  # type: ignore[attr-defined]
    text = both.file.getvalue()  # type: ignore[attr-defined]
    assert "score" in text and "mae 12.5" in text and "loss 0.25" in text and "%" not in text


def test_simulated_time_of_a_fleet_is_shown() -> None:
    event = round_event(4, 0.8)
    event["totals"] |= {"simulated_seconds": 7200.0, "simulated_joules": 1500.0}
    event["clock"] = {"seconds": 90.0, "joules": 500.0, "late": 2}
    run = watched()
    run.hear(event)
    assert "2.0 h simulated, 1.5 kJ (this round 90 s, 2 late)" in shown(run)
    assert "2.0 h simulated" in line(event) and "simulated" not in line(round_event(4, 0.8))
    assert "simulated" not in shown(watched())


def test_clients_of_the_round_are_counted_as_they_answer() -> None:
    run = watched()
    for event in [answered(4), answered(4), answered(4, "died")]:
        run.hear(event)
    assert "round 4: 2 of 4 done, 1 failed" in shown(run) and "measuring" not in shown(run)
    run.hear(answered(4))
    assert "round 4: 3 of 4 done, 1 failed, measuring" in shown(run)


def test_a_resumed_run_knows_its_past() -> None:
    run = Watched("demo", rounds=5)
    past = [{"event": "start", "dense_bytes": 2000}, round_event(1, 0.5), round_event(2, 0.75)]
    run.hear({"event": "resumed", "round": 2, "past": past})
    assert (
        run.round == 2
        and run.dense == 16000
        and run.measured == [(1, 0.5), (2, 0.75)]
        and run.left == pytest.approx(30)
    )


def test_lines_where_there_is_no_terminal_and_nothing_when_quiet() -> None:
    for quiet, wanted in {False: ["d: round 1/2, loss 0.500", "d: round 2/2"], True: []}.items():
        console = Console(file=io.StringIO(), force_terminal=False, width=40)  # lines stay whole
        with Progress(console, quiet) as progress:
            listen = progress.start("d", 2)
            listen({"event": "start", "dense_bytes": 500})
            progress.notice("stopping soon")
            for number in (1, 2):
                listen(answered(number))
                listen(round_event(number, 0.5))
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert lines[:1] == ([] if quiet else ["stopping soon"])
        assert len(lines[1:]) == len(wanted) and all(map(str.startswith, lines[1:], wanted))
        assert quiet or "2.0 kB, dense FedAvg 2.0 kB (1.0x), 0:00:10 left" in lines[1]


def test_warnings_and_errors_of_the_start_are_shown() -> None:
    begun = {"event": "start", "dense_bytes": 0, "warnings": ["weights are lost"], "start_errors": {"fc.weight": 0.25}}
    for quiet in (False, True):
        console = Console(file=io.StringIO(), force_terminal=False, width=40)
        with Progress(console, quiet) as progress:
            progress.start("d", 1)(begun)
        wanted = ["d: warning: weights are lost", "d: relative errors of the first factors against the given weights: "]
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert lines == ([] if quiet else [wanted[0], wanted[1] + "fc.weight 0.250"])


def test_a_terminal_gets_the_picture() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Progress(console, False) as progress:
        listen = progress.start("[b]d[/b]", 1)
        listen(answered(1))
        listen(round_event(1, 0.5))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[b]d[/b]: 1 rounds, accuracy 0.500, 2.0 kB" in text


def test_small_words() -> None:
    assert [in_bytes(size) for size in (0, 999, 1000, 1234567, 5e9, 2e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.2 MB",
        "5.0 GB",
        "2.0 TB",
    ]
    assert [clock(seconds) for seconds in (0, 59.6, 3661)] == ["0:00:00", "0:01:00", "1:01:01"]
    assert bars([0.0, 0.5, 1.0]) == "▁▅█" and bars([2.0, 2.0]) == "▁▁"
    assert traffic({}, 2000) == "nothing sent; dense FedAvg 2.0 kB"


def test_what_privacy_has_spent_is_shown_and_a_budget_ends_the_run() -> None:
    run = Watched("private", 5)
    event = {"event": "round", "round": 1, "cohort": [], "seconds": 1.0, "loss": None, "failures": []}
    event["totals"] = {"bytes_down": 0, "bytes_up": 0, "failures": 0}
    run.hear({**event, "privacy": {"epsilon": 1.23456, "clip": 1.0}})
    assert not run.done and "epsilon 1.235" in shown(run) and "loss" not in line(run.last)
    run.hear({**event, "round": 2, "privacy": {"epsilon": None, "clip": 1.0}})
    assert "epsilon infinite (no noise)" in line(run.last)
    run.hear({**event, "round": 3, "privacy": {"epsilon": 2.0, "clip": 1.0, "stopped": "too much"}})
    assert run.done and "3 rounds" in str(run.closing()) and "stopped: too much" in str(run.closing())
