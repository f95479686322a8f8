"""Figures reduced from a run's events, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedfactor.server.events import client_gains, spread, summarise_rounds
from fedfactor.task import Decider
from tests.helpers.tiny import run


def test_spread_by_hand() -> None:
    scores = [{"accuracy": value, "loss": 1.0} for value in (0.1, 0.2, *[0.5] * 9)]
    found = spread(dict(zip(range(20, 31), scores, strict=True)), {**dict.fromkeys(range(20, 31), 1.0), 21: 0.5})
    assert found["accuracy"] == pytest.approx(4.8 / 11)
    assert found["worst_decile"] == pytest.approx(0.15)  # the lowest two of eleven
    assert found["std"] == pytest.approx(math.sqrt(sum((s["accuracy"] - 4.8 / 11) ** 2 for s in scores) / 11))
    assert found["at"] == pytest.approx({"1": 0.46, "0.5": 0.2})
    assert found["each"][:2] == [0.1, 0.2] and found["who"][:2] == [20, 21]


def measured(round: int, **each: float) -> dict[str, Any]:
    scores = {int(client[1:]): {"accuracy": accuracy, "loss": 0.0} for client, accuracy in each.items()}
    return {"event": "round", "round": round, "all": spread(scores, dict.fromkeys(scores, 1.0))}


def test_who_wins_and_who_loses_by_hand() -> None:
    ours = [{"event": "start"}, measured(1, c0=0.5, c1=0.9, c2=0.5), measured(2, c0=0.2, c1=0.4, c2=0.6)]
    theirs = [measured(1, c1=0.1, c0=0.6), measured(2, c1=0.9, c0=0.5, c7=1.0)]
    found = client_gains(ours, theirs)
    assert (found["rounds"], found["clients"]) == ([1, 2], 2)  # the best mean of each; clients 2 and 7 were not in both
    assert (found["wins"], found["ties"], found["losses"], found["losers"]) == (0, 2, 0, [])
    last = client_gains(ours, theirs, when="last")
    assert (last["rounds"], last["losses"], last["losers"]) == ([2, 2], 2, [0, 1])
    assert last["mean_gain"] == pytest.approx(-0.4) and last["worst_gain"] == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="`evaluate_clients` selects what is measured"):
        client_gains(ours, theirs, measured="selected_after")
    with pytest.raises(ValueError, match="no client was measured"):
        client_gains([measured(1, c3=0.5)], theirs)
    with pytest.raises(ValueError, match="when must be one of best, last"):
        client_gains(ours, theirs, when="first")  # type: ignore[arg-type]


def test_runs_are_compared_client_by_client() -> None:
    settings = {"rounds": 2, "evaluate_clients": "all", "cohort": 6}
    local, plain = run("local", **settings), run("fedavg", **settings)
    found, back = (
        client_gains(local.history, plain.history, when="last"),
        client_gains(plain.history, local.history, when="last"),
    )
    assert found["clients"] == 6 == found["wins"] + found["ties"] + found["losses"]
    assert (found["wins"], found["losses"]) == (back["losses"], back["wins"])
    each = zip(local.history[-1]["all"]["each"], plain.history[-1]["all"]["each"], strict=True)
    assert found["losers"] == [client for client, (ours, theirs) in enumerate(each) if ours < theirs]


def test_scores_say_whose_they_are() -> None:
    event = run(rounds=1, evaluate_clients="all").history[-1]
    assert event["selected_after"]["who"] == event["selected_before"]["who"] == event["cohort"]
    assert event["all"]["who"] == list(range(6))


def test_summary_finds_last_best_and_target() -> None:
    def event(round: int, accuracy: float) -> dict[str, object]:
        total = {"bytes_up": 10 * round, "bytes_down": 0, "macs": round, "failures": 0}
        return {
            "event": "round",
            "round": round,
            "totals": total,
            "global": {"1": {"accuracy": accuracy}, "0.5": {"accuracy": 0.0}},
        }

    events = [{"event": "start"}, event(1, 0.3), event(2, 0.8), event(3, 0.7)]
    found = summarise_rounds(events, target=0.75)["global"]
    assert (found["final"], found["best"], found["best_round"]) == (0.7, 0.8, 2)
    assert found["reached"] == {"round": 2, "bytes_up": 20, "bytes_down": 0, "macs": 2, "failures": 0}
    assert summarise_rounds(events, target=0.9)["global"]["reached"] is None


def test_lower_is_better_by_hand() -> None:
    mae = Decider("mae", higher_is_better=False)
    scores = {client: {"loss": 1.0, "mae": float(client), "f1": 0.5, "examples": 3.0} for client in range(1, 12)}
    found = spread(scores, dict.fromkeys(scores, 1.0), mae)
    assert found["mae"] == 6 and found["worst_decile"] == 10.5 and found["f1"] == 0.5 and "examples" not in found
    start = {"event": "start", "metric": {"name": "mae", "higher_is_better": False}}

    def run_of(*errors: float) -> list[dict[str, Any]]:
        each = [{0: {"mae": error, "loss": 1 / error}, 1: {"mae": error + 2, "loss": 0.0}} for error in errors]
        return [start] + [
            {"event": "round", "round": t, "totals": {"macs": t}, "all": spread(one, {0: 1.0, 1: 1.0}, mae)}
            for t, one in enumerate(each, 1)
        ]

    summary = summarise_rounds(run_of(4.0, 1.0, 2.0), target=3.0)["all"]
    assert (summary["final"], summary["best"], summary["best_round"]) == (3.0, 2.0, 2)
    assert summary["reached"] == {"round": 2, "macs": 2}
    assert summary["best_scores"] == {"mae": 2.0, "loss": 0.5} and summary["final_scores"]["loss"] == 0.25
    gains = client_gains(run_of(4.0, 1.0), run_of(3.0, 5.0))
    assert (gains["rounds"], gains["wins"], gains["mean_gain"]) == ([2, 1], 2, 2.0)
    with pytest.raises(ValueError, match="measured by different metrics: mae, accuracy"):
        client_gains(run_of(4.0), [measured(1, c0=0.5)])
