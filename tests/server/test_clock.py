"""The virtual clock: times by hand, policies, and what it must not change."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fedfactor
from fedfactor import cost
from fedfactor.data.clients import FederatedData
from fedfactor.engines import Pool
from fedfactor.protocol.fleet import Device, Fleet
from fedfactor.protocol.local_optimizer import LocalOptimizer
from fedfactor.protocol.method import Participant
from fedfactor.protocol.settings import Capacities, Training
from fedfactor.protocol.setup import Setup
from fedfactor.registry import create
from fedfactor.server.clock import Clock
from fedfactor.server.costs import Costs, training_bytes
from fedfactor.server.federation import QuorumLost
from fedfactor.server.result import Result
from fedfactor.task import Task
from fedfactor.testing.federation import outcome
from tests.helpers.tiny import METHODS, Tiny, data, run, task
from tests.server.test_costs import Uncounted, X, Y

FAST = {"speed": 1e9, "mbps_down": 100.0, "mbps_up": 50.0, "joules_per_mac": 1e-9, "joules_per_byte": 1e-6}


def fleet(slow: dict[str, Any] | None = None, **options: Any) -> Fleet:
    """Half of the clients are a hundred times slower than the others."""
    slow = {**FAST, "speed": 1e7, "mbps_down": 1.0, "mbps_up": 0.5, **(slow or {})}
    return Fleet({"fast": Device(**FAST, share=0.5), "slow": Device(**slow, share=0.5)}, **options)


def clocks(result: Result) -> list[dict[str, Any]]:
    return [event["clock"] for event in result.history if event["event"] == "round"]


def seconds(clock: dict[str, Any]) -> list[float]:
    return [
        sum(each) for each in zip(*(clock[key] for key in ("offline", "download", "compute", "upload")), strict=True)
    ]


def test_times_and_energy_by_hand() -> None:
    result = run(rounds=2, fleet=Fleet({"only": Device(**FAST)}), epochs=2, evaluate_clients="none")
    event, macs = result.history[1], 3 * 2 * 40 * result.federation.costs.macs(1.0)
    clock = event["clock"]
    assert clock["compute"] == pytest.approx([macs / 1e9] * 3)
    assert clock["download"] == pytest.approx([cost.link_seconds(event["bytes_down"] / 3, 100, 1)] * 3, rel=0.01)
    assert clock["upload"] == pytest.approx([cost.link_seconds(event["bytes_up"] / 3, 50, 1)] * 3, rel=0.01)
    assert clock["seconds"] == pytest.approx(max(seconds(clock)), rel=1e-5) and clock["offline"] == [0.0] * 3
    moved = event["bytes_down"] + event["bytes_up"]
    assert clock["joules"] == pytest.approx(1e-9 * 3 * macs + 1e-6 * moved, rel=0.01)
    totals = result.summary["totals"]
    assert totals["simulated_seconds"] == pytest.approx(sum(one["seconds"] for one in clocks(result)))
    assert totals["simulated_joules"] == pytest.approx(sum(one["joules"] for one in clocks(result)))
    unknown = run(rounds=1, fleet=Fleet({"only": Device(**{**FAST, "joules_per_mac": None})}))
    assert "joules" not in clocks(unknown)[0] and "simulated_joules" not in unknown.summary["totals"]


def test_the_time_follows_from_the_examples_that_a_client_really_processes() -> None:
    only = Fleet({"only": Device(**FAST)})
    for training, passed in (
        ({"epochs": None, "local_steps": 3}, 3 * 3 * 10),
        ({"epochs": None, "local_steps": 3, "accumulate": 2}, 3 * 6 * 10),
        ({"epochs": 0.5}, 3 * 20),
    ):
        result = run(rounds=1, fleet=only, evaluate_clients="none", **training)
        assert clocks(result)[0]["compute"] == pytest.approx([passed * result.federation.costs.macs(1.0) / 1e9] * 3)
    phases = run("fedrep", rounds=1, fleet=only, evaluate_clients="none")
    examples = phases.federation.costs.examples(1.0, 40, 0)
    assert examples > 40  # the head's epochs and the body's
    assert clocks(phases)[0]["compute"] == pytest.approx([3 * examples * phases.federation.costs.macs(1.0) / 1e9] * 3)


def test_memory_counts_the_state_of_the_optimizer() -> None:
    network = nn.Linear(4, 3)
    plain, adam = (training_bytes(network, Training(optimizer=LocalOptimizer.of(name))) for name in ("sgd", "adam"))
    assert plain == 2 * 15 * 4 and adam == 4 * 15 * 4


@pytest.mark.parametrize("method", METHODS)
def test_a_round_takes_what_its_messages_and_networks_take(method: str) -> None:
    result = run(method, rounds=1, cohort=6, evaluate_clients="none", fleet=Fleet({"only": Device(**FAST)}))
    event, size = result.history[-1], 2**20 / 8
    assert sum(event["clock"]["download"]) * 100 * size == pytest.approx(event["bytes_down"], abs=6 * 200)
    assert sum(event["clock"]["upload"]) * 50 * size == pytest.approx(event["bytes_up"], abs=6 * 200)


def test_messages_of_an_optimizer_with_tensors_of_its_own_count() -> None:
    result = run(
        optimizer="scaffold", rounds=1, cohort=6, evaluate_clients="none", fleet=Fleet({"only": Device(**FAST)})
    )
    event = result.history[-1]
    assert sum(event["clock"]["upload"]) * 50 * 2**20 / 8 == pytest.approx(event["bytes_up"], abs=6 * 200)


def test_the_clock_changes_no_bits_when_nobody_is_dropped() -> None:
    plain, timed = (outcome(run("feddecomp", cohort=4, fleet=one)) for one in (None, fleet({"availability": 0.5})))
    assert plain["weights"] == timed["weights"] and plain["private"] == timed["private"]
    kept = [
        {key: value for key, value in event.items() if key not in ("clock", "totals", "fleet")}
        for event in timed["events"]
    ]
    assert kept == [{key: value for key, value in event.items() if key != "totals"} for event in plain["events"]]


def test_the_clock_is_the_same_on_every_engine_and_when_resumed(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {
        "fleet": fleet({"spread": 0.6, "failure": 0.3}, deadline=2.0, overselect=1.5),
        "quorum": 0.1,
    }
    whole = outcome(run("fedper", rounds=3, **chosen))
    with Pool(workers=2) as pool:
        assert outcome(run("fedper", rounds=3, engine=pool, **chosen)) == whole
    run("fedper", rounds=1, evaluate_every=1, directory=tmp_path / "a", **chosen)
    found = outcome(run("fedper", rounds=3, directory=tmp_path / "a", **chosen))
    assert found == whole
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["simulated_seconds"] > 0


def test_late_clients_are_dropped_counted_and_not_trained() -> None:
    waiting = run("feddecomp", cohort=6, rounds=2, fleet=fleet())
    short = run("feddecomp", cohort=6, rounds=2, fleet=fleet(deadline=0.2))
    assert clocks(waiting)[0]["seconds"] > 0.2 and clocks(short)[0]["seconds"] == 0.2
    clock, event = clocks(short)[0], short.history[1]
    assert clock["late"] == clock["used"] == 3 and clock["wasted_bytes"] > 0
    slow = {client for client, device in zip(clock["clients"], clock["devices"], strict=True) if device == "slow"}
    assert {one["client"] for one in event["failures"]} == slow and len(event["cohort"]) == 6
    assert event["failures"][0]["reason"] == "later than the deadline of 0.2 s"
    assert short.summary["failures"] == 6
    assert event["bytes_up"] == pytest.approx(waiting.history[1]["bytes_up"] / 2, rel=0.01)
    stored = short.federation.store
    assert [client for client in range(6) if stored.read("client", client) is None] == sorted(slow)


def test_the_first_of_more_clients_than_are_needed_are_used() -> None:
    plain, more = run(rounds=3, fleet=fleet()), run(rounds=3, fleet=fleet(overselect=1.6))
    for a, b, event in zip(clocks(plain), clocks(more), more.history[1:], strict=True):
        assert b["clients"][:3] == a["clients"] and len({*b["clients"]}) == 5
        assert b["used"] == 3 and b["surplus"] == 2 and b["seconds"] <= a["seconds"]
        fastest = sorted(zip(seconds(b), b["clients"], strict=True), key=lambda one: one[0])[:3]
        assert {client for _, client in fastest} == {*event["cohort"]} and event["failures"] == []
    assert more.summary["totals"]["simulated_seconds"] < plain.summary["totals"]["simulated_seconds"]


def test_devices_that_fail_cost_their_update_only() -> None:
    result = run(rounds=4, cohort=6, quorum=0.1, fleet=Fleet({"only": Device(**FAST, failure=0.5)}))
    failed = [clock["failed"] for clock in clocks(result)]
    assert 0 < sum(failed) == result.summary["failures"] < 24
    assert {one["reason"] for event in result.history[1:] for one in event["failures"]} == {"its device failed"}


def test_links_spread_around_their_median_and_offline_periods_stretch_the_work() -> None:
    clock = run(
        rounds=1, fleet=Fleet({"only": Device(**FAST, spread=0.5, availability=0.25, on_seconds=0.01)})
    ).federation.clock
    assert clock is not None
    timings = [clock.timing(Participant(0, 1.0, t)) for t in range(400)]
    down = [one.phases[1] for one in timings]
    plain = run(rounds=1, fleet=Fleet({"only": Device(**FAST)})).federation.clock
    assert plain is not None
    expected = plain.timing(Participant(0, 1.0, 0)).phases
    assert statistics.median(down) == pytest.approx(expected[1], rel=0.1)
    assert statistics.stdev(map(math.log, down)) == pytest.approx(0.5, rel=0.1)
    # Available a quarter of the time: each second of work takes three seconds of waiting, plus those at the start.
    waited = statistics.fmean(one.phases[0] for one in timings)
    worked = statistics.fmean(sum(one.phases[1:]) for one in timings)
    assert waited == pytest.approx(0.75 * 0.03 + 3 * worked, rel=0.15)


def test_capacities_can_follow_from_memory_and_deadline(tmp_path: Path) -> None:
    both = {1.0: 0.5, 0.5: 0.5}
    probe = run("heterofl", rounds=1, fleet=fleet(), capacities=both).federation
    small, full = probe.costs.memory(0.5), probe.costs.memory(1.0)
    assert small < full
    for chosen in (
        fleet({"memory": (small + full) / 2}, fit_capacities=True),
        fleet(deadline=0.5, fit_capacities=True),
    ):
        folder = tmp_path / str(chosen.deadline)
        result = run("heterofl", rounds=1, cohort=6, fleet=chosen, capacities=both, directory=folder)
        (clock,), event = clocks(result), result.history[1]
        had = dict(zip(clock["clients"], event["capacities"], strict=True))
        kinds = dict(zip(clock["clients"], clock["devices"], strict=True))
        assert had == {client: 1.0 if kinds[client] == "fast" else 0.5 for client in had}
        assert clock["late"] == 0
        dispatch = fedfactor.load(folder).rebuilt(task()).federation.dispatch
        assert {client: dispatch.participant(client, 1).capacity for client in range(6)} == had


def test_a_speed_can_be_measured_and_stays_when_the_run_is_resumed(tmp_path: Path) -> None:
    chosen = Fleet({"here": Device(**{**FAST, "speed": "measured"})})
    first = run(rounds=1, fleet=chosen, directory=tmp_path / "a")
    second = run(rounds=2, fleet=chosen, directory=tmp_path / "a")
    speeds = {value for clock in clocks(second) for value in clock["compute"]}
    assert len(speeds) == 1 and clocks(first)[0]["compute"][0] in speeds
    assert json.loads((tmp_path / "a" / "task.json").read_text())["speed"] > 0


# Bad input.


def test_a_deadline_that_nobody_meets_is_said_before_anybody_trains() -> None:
    heard: list[str] = []
    with pytest.raises(
        QuorumLost,
        match=r"round 1: no client meets fleet\.deadline = 1e-05 s: the fastest, client \d with device 'fast', needs",
    ):
        run(fleet=fleet(deadline=1e-5), on_event=lambda event: heard.append(event["event"]))
    assert "answered" not in heard


def test_a_deadline_that_too_few_meet_is_said_before_anybody_trains() -> None:
    heard: list[str] = []
    with pytest.raises(
        QuorumLost,
        match=r"3 of 6 clients can answer in time, the quorum is 0\.9 \(client .*: later than the deadline of 0\.2 s\)",
    ):
        run(cohort=6, quorum=0.9, fleet=fleet(deadline=0.2), on_event=lambda event: heard.append(event["event"]))
    assert "answered" not in heard


def test_a_device_without_enough_memory_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"device 'slow' fits no capacity: the smallest, 0\.5, needs .* MB to train a batch of 10"
    ):
        run("heterofl", fleet=fleet({"memory": 1000.0}, fit_capacities=True))
    need = run("heterofl", rounds=1).federation.costs.memory(0.5)
    with pytest.raises(ValueError, match=r"device 'slow' and capacity 1 need .* fleet\.fit_capacities to true"):
        run("heterofl", fleet=fleet({"memory": 1.01 * need}))
    with pytest.raises(ValueError, match=r"set capacities\.dynamic to false"):
        capacities = Capacities({1.0: 0.5, 0.5: 0.5}, dynamic=True)
        run("heterofl", fleet=fleet(fit_capacities=True), capacities=capacities)


def test_models_that_cannot_be_counted_have_no_clock() -> None:
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="fleet: the model's operations cannot be counted"):
        fedfactor.simulate(Uncounted(4, 3), (X, Y), rounds=1, clients=3, fleet={"gateway": 1.0})
    assert isinstance(fedfactor.simulate(nn.Linear(4, 3), (X, Y), rounds=1, clients=3, fleet={"gateway": 1.0}), Result)


def test_clients_whose_data_are_elsewhere_have_no_clock() -> None:
    described = Task(Tiny, FederatedData.without_examples(3, data().example))
    setup = Setup(
        described, create("methods", "fedavg"), create("optimizers", "fedavg"), create("codecs", "float32"), Training()
    )
    with pytest.raises(ValueError, match="fleet: the number of examples per client is not known"):
        Clock(fleet(), setup, Costs(setup))
