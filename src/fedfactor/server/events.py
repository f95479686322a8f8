"""Summaries of a run's events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any, Literal

from fedfactor.support.checks import check_choice
from fedfactor.task import ACCURACY, Decider


def spread(
    found: Mapping[int, dict[str, float]], capacities: Mapping[int, float], decider: Decider = ACCURACY
) -> dict[str, Any]:
    """Summarise the scores of clients: means, and of the deciding metric the standard deviation and all values.

    `worst_decile` is the mean of the worst tenth of the clients. `at` has the mean over the clients of each capacity,
    whatever their method makes of their capacity.
    """
    scores = list(found.values())
    values = [score[decider.name] for score in scores]
    mean = sum(values) / len(values)
    worst = sorted(values, key=decider.goodness)[: max(1, math.ceil(len(values) / 10))]
    by_level: dict[float, list[float]] = {}
    for client, score in found.items():
        by_level.setdefault(capacities[client], []).append(score[decider.name])
    others = [key for key in scores[0] if key != "examples" and all(key in score for score in scores)]
    return {
        decider.name: mean,
        **{key: sum(score[key] for score in scores) / len(scores) for key in others},
        "std": math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)),
        "worst_decile": sum(worst) / len(worst),
        "at": {f"{level:g}": fmean(some) for level, some in sorted(by_level.items(), reverse=True)},
        "clients": len(values),
        "each": values,
        "who": list(found),
    }


def start_line(event: Mapping[str, Any]) -> str:
    """Say how far a run started from the given weights, from its first event; empty if it started from all of them."""
    errors = event.get("start_errors", {})
    each = ", ".join(f"{name} {error:.3f}" for name, error in errors.items())
    return f"relative errors of the first factors against the given weights: {each}" if errors else ""


def privacy_line(spent: Mapping[str, Any]) -> str:
    """Say what a run with differential privacy has spent so far; `spent` may lack all but `epsilon`."""
    if spent["epsilon"] is None:
        return "epsilon infinite (no noise)"
    delta = f" at delta {spent['delta']:g}" if "delta" in spent else ""
    stopped = f"; stopped: {spent['stopped']}" if "stopped" in spent else ""
    return f"epsilon {spent['epsilon']:.4g}{delta}{stopped}"


def summarise_rounds(events: list[dict[str, Any]], target: float | None = None) -> dict[str, Any]:
    """Summarise a run's events: the deciding metric at the end and at best, and the cost of reaching the target.

    `final_scores` and `best_scores` are all metrics after the last measured round, and in the best one.
    """
    decider = decider_of(events)
    rounds = [event for event in events if event["event"] == "round"]
    found: dict[str, Any] = {"rounds": len(rounds), "totals": rounds[-1]["totals"] if rounds else {}}
    trained = {level for event in rounds for level in event.get("trained_capacities", ())}
    found["trained_capacities"] = sorted(trained, reverse=True)
    found |= {key: event[key] for event in events[:1] for key in ("start_errors", "warnings") if key in event}
    for key in ("global", "all", "selected_after", "selected_before"):
        curve = [(event, decider.of(event[key])) for event in rounds if key in event]
        if not curve:
            continue
        best = max(curve, key=lambda point: decider.goodness(point[1]))
        found[key] = {"final": curve[-1][1], "best": best[1], "best_round": best[0]["round"]}
        ends = {"final": curve[-1][0], "best": best[0]}
        found[key] |= {f"{when}_scores": decider.metrics(event[key]) for when, event in ends.items()}
        found[key]["at"] = _by_capacity(curve[-1][0][key], decider.name)
        if target is not None:
            enough = decider.goodness(target)
            reached = next((event for event, value in curve if decider.goodness(value) >= enough), None)
            found[key]["target"] = target
            found[key]["reached"] = None if reached is None else {"round": reached["round"], **reached["totals"]}
    return found


def client_gains(
    ours: list[dict[str, Any]],
    theirs: list[dict[str, Any]],
    *,
    measured: Literal["all", "selected_before", "selected_after"] = "all",
    when: Literal["best", "last"] = "best",
) -> dict[str, Any]:
    """Compare the clients' scores in two runs, given their events: which clients gain or lose (FedDecomp, Fig. 7).

    A gain is a difference of the deciding metric, positive where the first run is better. `when` selects the round of
    each run: the one with the best mean, or the last that was measured.
    """
    check_choice("measured", measured, ("all", "selected_before", "selected_after"))
    check_choice("when", when, ("best", "last"))
    decider = decider_of(ours)
    if decider != decider_of(theirs):
        raise ValueError(f"the runs are measured by different metrics: {decider.name}, {decider_of(theirs).name}")
    mine, other = (_chosen(events, measured, when, decider) for events in (ours, theirs))
    common = sorted(mine[1].keys() & other[1].keys())
    if not common:
        raise ValueError(
            f"no client was measured in both runs, in round {mine[0]} of the first and round {other[0]} of the second"
        )
    gains = {client: decider.goodness(mine[1][client] - other[1][client]) for client in common}
    return {
        "measured": measured,
        "rounds": [mine[0], other[0]],
        "clients": len(common),
        "wins": sum(gain > 0 for gain in gains.values()),
        "ties": sum(gain == 0 for gain in gains.values()),
        "losses": sum(gain < 0 for gain in gains.values()),
        "losers": [client for client, gain in gains.items() if gain < 0],
        "mean_gain": sum(gains.values()) / len(common),
        "worst_gain": min(gains.values()),
    }


def _chosen(events: list[dict[str, Any]], measured: str, when: str, decider: Decider) -> tuple[int, dict[int, float]]:
    """Return the selected round and the scores of its clients."""
    rounds = [event for event in events if event["event"] == "round" and measured in event]
    if not rounds:
        raise ValueError(f"a run has no measurement {measured!r}; `evaluate_clients` selects what is measured")
    event = rounds[-1] if when == "last" else max(rounds, key=lambda one: decider.goodness(decider.of(one[measured])))
    return event["round"], dict(zip(event[measured]["who"], event[measured]["each"], strict=True))


def decider_of(events: list[dict[str, Any]]) -> Decider:
    """Return the metric that decides which of a run's models is best."""
    return Decider.read(events[0] if events else {})


def _by_capacity(scores: dict[str, Any], name: str) -> dict[str, float]:
    """Return the deciding metric of the server's model at each capacity, or of the clients of each capacity."""
    at = scores.get("at", {}) if name in scores else {level: one[name] for level, one in scores.items()}
    return dict(at)
