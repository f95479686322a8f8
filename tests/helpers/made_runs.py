"""Run directories with made-up figures, as `fedfactor run` would write them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

CLIENTS = 20
DENSE = 4_000_000
PROTOCOL = {"global": "none: this run is made up", "clients": "all clients on their own test data", "every": 1}


def make_run(
    folder: Path,
    method: str = "fedavg",
    seed: int = 0,
    rounds: int = 10,
    *,
    top: float = 0.9,
    factor: float = 1.0,
    each: bool = True,
    options: Mapping[str, Any] | None = None,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
    done: int | None = None,
    levels: tuple[str, ...] = ("1",),
    failing: str = "",
    metric: str = "accuracy",
    clock: bool = False,
) -> Path:
    """Write a run whose accuracy rises to `top` and which moves `factor` times as many bytes as dense FedAvg.

    With another `metric`, the same numbers fall from 100 to 100 - `top`, and lower ones are better.
    """
    folder.mkdir(parents=True)
    recipe: dict[str, Any] = {
        "name": "made-up",
        "partition": {"kind": "dirichlet", "clients": CLIENTS, "alpha": 0.5, "seed": 0},
        "method": {"name": method, **(options or {})},
        "codec": {"name": "float32"},
        "train": {"rounds": rounds, "seed": seed, "lr": 0.1},
        "evaluate": {"every": 1},
    }
    for section, values in (sections or {}).items():
        recipe[section] = {**recipe.get(section, {}), **values}
    (folder / "recipe.toml").write_text(tomli_w.dumps(recipe))
    names = [str(digit) for digit in range(10)]
    examples = [[(client * 7 + label * 3) % 11 for label in range(10)] for client in range(CLIENTS)]
    task = {"kind": "classification", "classes": 10, "class_names": names, "clients": CLIENTS, "examples": examples}
    (folder / "task.json").write_text(json.dumps(task))
    lines: list[dict[str, Any]] = [{"event": "start", "dense_bytes": DENSE, "protocol": PROTOCOL}]
    for t in range(1, (rounds if done is None else done) + 1):
        event = made_round(t, rounds, method, seed, top, factor, each, levels, failing)
        if clock:
            event["clock"] = made_clock(factor, seed)
            seconds, joules = (t * event["clock"][key] for key in ("seconds", "joules"))
            event["totals"] |= {"simulated_seconds": seconds, "simulated_joules": joules}
        lines.append(event)
    if metric != "accuracy":
        lines[0]["metric"] = {"name": metric, "higher_is_better": False}
        for scores in (scores for line in lines for scores in (*line.get("global", {}).values(), line.get("all"))):
            if scores:
                scores[metric] = 100 - scores.pop("accuracy")
                scores |= {"each": [100 - value for value in scores["each"]]} if "each" in scores else {}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def made_round(
    t: int,
    rounds: int,
    method: str,
    seed: int,
    top: float,
    factor: float,
    each: bool,
    levels: tuple[str, ...],
    failing: str,
) -> dict[str, Any]:
    score = top * (1 - math.exp(-5 * t / rounds)) + 0.01 * math.sin(7 * t + 3 * seed)
    size = round(factor * DENSE * 5 / 2)
    event: dict[str, Any] = {
        "event": "round",
        "round": t,
        "cohort": [0, 1, 2, 3, 4],
        "capacities": [1.0] * 5,
        "loss": 2.0 / t,
        "bytes_down": size,
        "bytes_up": size,
        "macs": 10**9,
        "totals": {"bytes_down": size * t, "bytes_up": size * t, "macs": t * 10**9, "failures": 0},
        "failures": [{"client": 3, "reason": failing}] if failing and t == 2 else [],
        "link_seconds": {"2": 8.0 * factor + 1, "10": 1.6 * factor + 1, "50": 0.3 * factor + 1},
        "seconds": 1.5,
        "global": {level: {"accuracy": score * (0.7 + 0.3 * float(level)), "loss": 1.0} for level in levels},
    }
    if each:
        values = [min(1.0, max(0.0, score + 0.02 * math.sin(client * 5 + seed))) for client in range(CLIENTS)]
        event["all"] = {"accuracy": sum(values) / CLIENTS, "each": values, "who": list(range(CLIENTS))}
    if method == "prism":
        event["observed"] = {
            "effective_rank": {f"layer{i}": 4.0 + i + t / rounds for i in range(4)},
            "picks": {f"layer{i}": [5, 4, 3, 2, 1] for i in range(4)},
        }
    if method == "flanc":
        gram = [[1.0 if i == j else 0.01 * (i - j) for j in range(8)] for i in range(8)]
        usage = {"1": [0.5 + 0.01 * i for i in range(8)], "0.5": [0.4 - 0.01 * i for i in range(8)]}
        event["observed"] = {"gram": {"conv1": gram, "conv2": gram}, "mean_abs_u": {"conv1": usage, "conv2": usage}}
    if method == "feddecomp":
        event["observed"] = {"tau_change": 0.1 * t, "sigma_distance": 1 / t}
    return event


def made_clock(factor: float, seed: int) -> dict[str, Any]:
    """Five clients on two kinds of devices; the last is later than the deadline, the first was offline."""
    upload = [40.0 * factor + seed, 4.0 * factor, 5.0 * factor, 6.0 * factor, 200.0]
    return {
        "seconds": 60.0 * factor + seed,
        "joules": 100.0 * factor,
        "used": 4, "late": 1, "failed": 0, "surplus": 0, "wasted_bytes": 1000,
        "clients": [0, 1, 2, 3, 4],
        "devices": ["phone <old>", "pc", "pc", "pc", "phone <old>"],
        "outcomes": ["used", "used", "used", "used", "late"],
        "offline": [10.0, 0.0, 0.0, 0.0, 0.0],
        "download": [4.0 * factor, 0.4, 0.5, 0.6, 20.0],
        "compute": [6.0, 1.0, 1.5, 2.0, 8.0],
        "upload": upload,
    }  # fmt: skip


def timed_comparison(folder: Path, rounds: int = 10) -> Path:
    """Write runs of two methods and two seeds on a fleet."""
    for seed in (0, 1):
        make_run(folder / f"fedavg-{seed}", "fedavg", seed, rounds, top=0.8, clock=True)
        make_run(folder / f"fedpara-{seed}", "fedpara", seed, rounds, top=0.8, factor=0.2, clock=True)
    return folder


def comparison(folder: Path, rounds: int = 10, seeds: int = 4) -> Path:
    """Write a comparison of five methods and some seeds."""
    for seed in range(seeds):
        make_run(folder / f"fedavg-{seed}", "fedavg", seed, rounds, top=0.80, failing="took <too> long")
        make_run(folder / f"local-{seed}", "local", seed, rounds, top=0.70, factor=0.0)
        make_run(folder / f"prism-{seed}", "prism", seed, rounds, top=0.78, factor=0.4)
        make_run(folder / f"flanc-{seed}", "flanc", seed, rounds, top=0.82, factor=0.3, levels=("1", "0.5", "0.25"))
        make_run(folder / f"feddecomp-{seed}", "feddecomp", seed, rounds, top=0.88)
    return folder
