"""Seconds a round of whole federations against the plain PyTorch loop, in turn in one run."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.harness import emit, note
from benchmarks.plain import loops
from benchmarks.workloads import CIFAR, LOGISTIC, Workload
from fedfactor import simulate
from fedfactor.data.clients import FederatedData
from fedfactor.engines import Engine, Inline, Pool


def seconds_a_round(
    work: Workload, engine: Engine, rounds: int, variants: dict[str, dict[str, Any]], warmup: int = 2
) -> dict[str, float]:
    """Run a federation, and a round of each plain loop after each of its rounds; return the medians of all."""
    inputs, labels = work.data()
    data = FederatedData((inputs, labels), [work.rows(client) for client in range(work.users)])
    times: dict[str, list[float]] = {"fedfactor": [], **{name: [] for name in variants}}
    with loops(work, (inputs, labels), variants) as plain:
        start = [time.perf_counter()]

        def after(event: dict[str, Any]) -> None:
            if event["event"] == "round":  # from the end of the last one's turn: the commit in between is counted
                times["fedfactor"].append(time.perf_counter() - start[0])
                for name, loop in plain.items():
                    begin = time.perf_counter()
                    loop.round()
                    times[name].append(time.perf_counter() - begin)
                start[0] = time.perf_counter()

        simulate(
            work.build, data, engine=engine, on_event=after, rounds=warmup + rounds, cohort=work.cohort,
            batch_size=work.batch, lr=work.lr, evaluate_every=0, evaluate_clients="none",
        )  # fmt: skip
    for name, each in times.items():
        note(f"{work.name}, {name}: " + " ".join(f"{1e3 * seconds:.0f}" for seconds in each) + " ms")
    return {name: statistics.median(each[warmup:]) for name, each in times.items()}


PLAIN = {"plain": {"workers": 2, "fused": False}, "plain, fused SGD": {"workers": 2, "fused": True}}
"""Torch's default SGD, and its fused one, in two processes."""


def run() -> None:
    with Pool(2) as pool:
        _report("cifar_2_workers", seconds_a_round(CIFAR, pool, 15, PLAIN), "<= 1.0")
    alone = {name: {**options, "workers": 0} for name, options in PLAIN.items()}
    _report("logistic_inline", seconds_a_round(LOGISTIC, Inline(), 100, alone, 10), "<= 1.3")
    with Pool(2) as pool:
        _report("logistic_2_workers", seconds_a_round(LOGISTIC, pool, 100, PLAIN, 10), "<= 1.3")


def _report(name: str, found: dict[str, float], target: str) -> None:
    note(f"{name}: " + ", ".join(f"{key} {1e3 * value:.1f} ms" for key, value in found.items()))
    emit(f"{name}_seconds", found["fedfactor"], "s a round", "none, for comparison")
    for key, value in found.items():
        if key != "fedfactor":
            emit(f"{name}_over_{key.replace(', ', '_').replace(' ', '_')}", found["fedfactor"] / value, "ratio", target)
