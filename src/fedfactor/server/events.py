"""Summaries of a run's events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any, Literal

from fedfactor.support.checks import check_choice


def spread(found: Mapping[int, dict[str, float]], capacities: Mapping[int, float]) -> dict[str, Any]:
    """Summarise accuracies by client: mean, standard deviation, worst decile, and all values with their clients.

    `at` has the mean over the clients of each capacity, whatever their method makes of their capacity.
    """
    scores = list(found.values())
    values = [score["accuracy"] for score in scores]
    mean = sum(values) / len(values)
    lowest = sorted(values)[: max(1, math.ceil(len(values) / 10))]
    by_level: dict[float, list[float]] = {}
    for client, score in found.items():
        by_level.setdefault(capacities[client], []).append(score["accuracy"])
    others = [key for key in ("loss", "perplexity") if all(key in score for score in scores)]
    return {
        "accuracy": mean,
        **{key: sum(score[key] for score in scores) / len(scores) for key in others},
        "std": math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)),
        "worst_decile": sum(lowest) / len(lowest),
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


def summarise_rounds(events: list[dict[str, Any]], target: float | None = None) -> dict[str, Any]:
    """Summarise a run's events: final and best accuracy, and the cost of reaching the target."""
    rounds = [event for event in events if event["event"] == "round"]
    found: dict[str, Any] = {"rounds": len(rounds), "totals": rounds[-1]["totals"] if rounds else {}}
    trained = {level for event in rounds for level in event.get("trained_capacities", ())}
    found["trained_capacities"] = sorted(trained, reverse=True)
    found |= {key: event[key] for event in events[:1] for key in ("start_errors", "warnings") if key in event}
    for key in ("global", "all", "selected_after", "selected_before"):
        curve = [(event, _accuracy(event[key])) for event in rounds if key in event]
        if not curve:
            continue
        best = max(curve, key=lambda point: point[1])
        found[key] = {"final": curve[-1][1], "best": best[1], "best_round": best[0]["round"]}
        found[key]["at"] = _by_capacity(curve[-1][0][key])
        reached = next((event for event, value in curve if target is not None and value >= target), None)
        if target is not None:
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
    """Compare the clients' accuracies in two runs, given their events: which clients gain or lose (FedDecomp, Fig. 7).

    `when` selects the round of each run: the one with the highest mean accuracy, or the last that was measured.
    """
    check_choice("measured", measured, ("all", "selected_before", "selected_after"))
    check_choice("when", when, ("best", "last"))
    mine, other = (_chosen(events, measured, when) for events in (ours, theirs))
    common = sorted(mine[1].keys() & other[1].keys())
    if not common:
        raise ValueError(
            f"no client was measured in both runs, in round {mine[0]} of the first and round {other[0]} of the second"
        )
    gains = {client: mine[1][client] - other[1][client] for client in common}
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


def _chosen(events: list[dict[str, Any]], measured: str, when: str) -> tuple[int, dict[int, float]]:
    """Return the selected round and the accuracies of its clients."""
    rounds = [event for event in events if event["event"] == "round" and measured in event]
    if not rounds:
        raise ValueError(f"a run has no measurement {measured!r}; `evaluate_clients` selects what is measured")
    event = rounds[-1] if when == "last" else max(rounds, key=lambda event: event[measured]["accuracy"])
    return event["round"], dict(zip(event[measured]["who"], event[measured]["each"], strict=True))


def _by_capacity(scores: dict[str, Any]) -> dict[str, float]:
    """Return the accuracy of the server's model at each capacity, or of the clients of each capacity."""
    at = scores.get("at", {}) if "accuracy" in scores else {level: one["accuracy"] for level, one in scores.items()}
    return dict(at)


def _accuracy(scores: dict[str, Any]) -> float:
    """Return the accuracy of a measurement, at the largest capacity if there are several."""
    if "accuracy" in scores:
        return float(scores["accuracy"])
    return float(scores[max(scores, key=float)]["accuracy"])
