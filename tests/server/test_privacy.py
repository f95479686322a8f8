"""Rounds with differential privacy: by hand, the same on each engine and after a resumption, and what they tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfactor.engines import Pool
from fedfactor.protocol.fleet import Device, Fleet
from fedfactor.protocol.message import decode
from fedfactor.protocol.privacy import Privacy
from fedfactor.protocol.settings import Capacities
from fedfactor.rng import torch_rng
from fedfactor.server.federation import Federation
from fedfactor.testing.federation import Recording, Tampering, outcome, run
from tests.helpers import quadratic

PLAIN: dict[str, Any] = {"clip": 1.0, "delta": 1e-5, "noise": 0.5, "sampling": "none"}


class Grouped(nn.Module):
    """A small network of any width with group norms, whose statistics nobody sends."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        a, b, c = int(8 * width), int(16 * width), int(32 * width)
        self.conv1, self.norm = nn.Conv2d(1, a, 3, padding=1), nn.GroupNorm(1, a)
        self.conv2 = nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False)
        self.hidden, self.fc = nn.Linear(b * 16, c), nn.Linear(c, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.norm(self.conv1(x)).relu()).relu()
        logits: Tensor = self.fc(self.hidden(x.flatten(1)).relu())
        return logits


def private(method: str = "fedavg", privacy: dict[str, Any] | None = None, **settings: Any) -> Any:
    chosen = {"model": Grouped, "evaluate_clients": "none", "privacy": {**PLAIN, **(privacy or {})}, **settings}
    return run(method, **chosen)


# By hand.


def test_a_round_by_hand() -> None:
    """The clients change x = 0 by 0.19 and -0.36; a clip of 0.25 leaves 0.19 and -0.25, whatever their examples."""
    data = quadratic.clients((1.0, 1.0), (2.0, -1.0), copies=(1, 5))
    clipped = quadratic.run(data=data, privacy={"clip": 0.25, "delta": 1e-5, "noise": 0.0, "sampling": "none"})
    assert quadratic.x(clipped) == pytest.approx((0.19 - 0.25) / 2, abs=1e-12)
    assert clipped.history[-1]["privacy"] == {"epsilon": None, "clip": 0.25}
    noisy = quadratic.run(data=data, seed=7, privacy={"clip": 0.25, "delta": 1e-5, "noise": 2.0, "sampling": "none"})
    noise = float(torch.randn(1, generator=torch_rng(7, "privacy", 0))) * 2.0 * 0.25
    assert quadratic.x(noisy) == pytest.approx((0.19 - 0.25 + noise) / 2, abs=1e-12)


def test_an_adaptive_clip_counts_the_clients_within_it() -> None:
    """Without noise: 0.19 is within 0.25, 0.36 is not, so half of the clients; the quantile is a quarter."""
    settings = {"clip": "adaptive", "clip_start": 0.25, "quantile": 0.25, "noise": 0.0, "sampling": "none"}
    found = quadratic.run(rounds=2, privacy={**settings, "delta": 1e-5})
    first, second = (event["privacy"] for event in found.history[1:])
    assert first["within"] == 0.5 and first["next_clip"] == second["clip"] == pytest.approx(0.25 * 0.951229, rel=1e-6)


def test_a_client_that_adds_the_noise_sends_nothing_else() -> None:
    engine = Recording()
    settings = {"clip": 0.25, "delta": 1e-5, "noise": 1.0, "where": "client"}
    found = quadratic.run(engine=engine, privacy=settings)
    sent = [float(decode(message).tensors["model/x"]) for message in engine.up]
    assert quadratic.x(found) == pytest.approx(sum(sent) / 2) and {round(x, 6) for x in sent} != {0.19, -0.25}
    assert (
        len({round(x - y, 6) for x, y in zip(sent, (0.19, -0.25), strict=True)}) == 2
    )  # each client has its own noise


# Methods.

WITHOUT_NOISE = {"clip": 1e6, "noise": 0.0}
SHARED = (
    "fedavg", "fedpara", "pfedpara", "low_rank", "pufferfish", "feddecomp", "fedper", "fedrep", "lg_fedavg", "fedrod",
    "pfedsd", "heterofl", "origdrop", "fedrolex", "fjord", "slim", "fedhm", "flanc",
)  # fmt: skip


@pytest.mark.parametrize("method", SHARED)
def test_a_clip_that_cuts_nothing_changes_nothing_without_noise(method: str) -> None:
    """If all clients take part, the expected holders of an element are its holders."""
    settings: dict[str, Any] = {"model": Grouped, "evaluate_clients": "none", "cohort": 1.0, "rounds": 1}
    expected, found = run(method, **settings), private(method, WITHOUT_NOISE, **settings)
    assert found.server.tensors.keys() == expected.server.tensors.keys()
    for name, tensor in expected.server.tensors.items():
        torch.testing.assert_close(found.server.tensors[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "method", ["lora", "ffa_lora", "fed_sb", "rolora", "fedsa_lora", "raflora", "flexlora", "fedsvd"]
)
def test_changes_of_a_frozen_base_too(method: str) -> None:
    from fedfactor.nn import Tune
    from fedfactor.registry import create

    settings: dict[str, Any] = {"model": Grouped(), "evaluate_clients": "none", "cohort": 1.0, "rounds": 1}
    settings |= {"tune": Tune(), "capacities": {1.0: 1.0}}
    made = create("methods", method, rank=3)
    expected, found = run(made, **settings), run(made, privacy={**PLAIN, **WITHOUT_NOISE}, **settings)
    ours, theirs = (result.model.state_dict() for result in (found, expected)) if method != "fedsa_lora" else ({}, {})
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["fedavg", "fedpara", "heterofl", "fedhm", "prism", "orthdrop"])
def test_no_client_moves_the_sum_by_more_than_the_clip(method: str) -> None:
    """Composed changes are clipped as they reach the server."""
    settings: dict[str, Any] = {"cohort": 1.0, "rounds": 1, "capacities": {0.5: 1.0}, "lr": 0.5}
    settings["privacy"] = {"clip": 0.01, "noise": 0.0}
    everyone = private(method, **settings).server.tensors
    without = private(method, engine=Tampering(2, lambda done: None), **settings).server.tensors
    moved = torch.cat([(everyone[name] - without[name]).flatten() for name in everyone]) * 6
    assert 0.95 * 0.01 < moved.double().norm().item() < 1.01 * 0.01


def test_private_tensors_spend_nothing() -> None:
    found = private("local", {"noise": 1.0}, cohort=1.0).summary["privacy"]
    assert found["epsilon"] == 0.0 and found["shared"] == 0 and found["private"] > 0
    shared, partly = (private(method).summary["privacy"] for method in ("fedpara", "pfedpara"))
    assert partly["shared"] < shared["shared"] and shared["private"] == 0 < partly["private"]


# Rounds.


def test_the_pool_computes_the_same_bits() -> None:
    with Pool(2) as pool:
        for method, where in (("fedhm", "server"), ("pfedpara", "client")):
            here, there = (private(method, {"where": where}, engine=engine) for engine in (None, pool))
            assert outcome(here) == outcome(there)


def test_a_resumed_run_neither_loses_nor_repeats_spending(tmp_path: Path) -> None:
    settings = {"clip": "adaptive", "noise": 0.25, "sampling": "poisson"}
    whole = private(privacy=settings, rounds=3, evaluate_every=1)

    class Stop(RuntimeError):
        pass

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "answered" and event["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        private(privacy=settings, rounds=3, evaluate_every=1, directory=tmp_path, on_event=stop)
    resumed = private(privacy=settings, rounds=3, evaluate_every=1, directory=tmp_path)
    assert outcome(resumed) == outcome(whole)
    spent = [event["privacy"]["epsilon"] for event in resumed.history[1:]]
    assert spent == sorted(spent) and len(set(spent)) == 3
    with pytest.raises(ValueError, match="started with other settings: privacy was"):
        private(privacy={**settings, "noise": 0.2}, rounds=4, directory=tmp_path)


def test_cohorts_are_drawn_client_by_client_and_may_be_empty() -> None:
    found = private(privacy={"sampling": "poisson", "noise": 1.0}, cohort=1, rounds=12, epochs=0)
    sizes = [len(event["cohort"]) for event in found.history[1:]]
    assert 0 in sizes and max(sizes) > 1  # the expected size is 1
    empty = found.history[1 + sizes.index(0)]
    assert empty["bytes_up"] == 0 and empty["privacy"]["epsilon"] > 0 and empty["failures"] == []


def test_an_empty_cohort_adds_noise_only() -> None:
    settings = {"clip": 0.25, "delta": 1e-5, "noise": 2.0, "sampling": "poisson"}
    seed = next(seed for seed in range(99) if not _cohort(seed))
    found = quadratic.run(data=quadratic.clients(*[(1.0, 1.0)] * 3), cohort=1, seed=seed, privacy=settings)
    noise = float(torch.randn(1, generator=torch_rng(seed, "privacy", 0))) * 2.0 * 0.25
    assert found.history[1]["cohort"] == [] and quadratic.x(found) == pytest.approx(noise, abs=1e-12)


def _cohort(seed: int) -> list[int]:
    data = quadratic.clients(*[(1.0, 1.0)] * 3)
    settings = {"clip": 0.25, "delta": 1e-5, "noise": 2.0, "sampling": "poisson"}
    found = quadratic.run(data=data, rounds=0, cohort=1, seed=seed, privacy=settings).federation
    assert found.privacy is not None
    return found.privacy.cohort_of(0)


def test_an_empty_cohort_is_a_round_for_every_kind_of_method() -> None:
    for method in ("fedhm", "prism", "heterofl"):
        found = private(method, {"sampling": "poisson", "noise": 1.0}, cohort=1, rounds=4, epochs=0, seed=2)
        assert 0 in [len(event["cohort"]) for event in found.history[1:]]


def test_an_empty_cohort_takes_no_time_on_a_fleet() -> None:
    settings: dict[str, Any] = {"cohort": 1, "rounds": 8, "epochs": 0, "fleet": {"phone-mid": 1.0}}
    found = private(privacy={"sampling": "poisson", "noise": 1.0}, **settings)
    times = [event["totals"]["simulated_seconds"] for event in found.history[1:]]
    empty = [event["round"] - 1 for event in found.history[1:] if not event["cohort"]]
    assert empty and times == sorted(times)
    assert all(times[place] == (times[place - 1] if place else 0.0) for place in empty)


def test_a_budget_stops_the_run_at_the_last_round_that_fits(tmp_path: Path) -> None:
    free = private(privacy={"noise": 4.0}, rounds=5, epochs=0)
    spent = [event["privacy"]["epsilon"] for event in free.history[1:]]
    settings: dict[str, Any] = {"rounds": 5, "epochs": 0, "evaluate_every": 0, "directory": tmp_path}
    found = private(privacy={"noise": 4.0, "budget": spent[2]}, **settings)
    assert found.summary["rounds"] == 3 and "would exceed the budget" in found.summary["privacy"]["stopped"]
    assert "global" in found.history[-1] and "stopped" in str(found)  # the last round is measured
    more = private(privacy={"noise": 4.0, "budget": spent[3]}, **settings)
    assert more.summary["rounds"] == 4 and more.history[-1]["privacy"]["epsilon"] == spent[3]
    with pytest.raises(ValueError, match="the first round spends an epsilon of"):
        private(privacy={"noise": 4.0, "budget": 0.01})


def test_the_noise_is_solved_for_the_rounds_of_the_run(tmp_path: Path) -> None:
    settings = {"noise": None, "epsilon": 4.0}
    found = private(privacy=settings, rounds=3, epochs=0, directory=tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 3.9 < found.summary["privacy"]["epsilon"] <= 4.0 and summary["privacy"]["noise"] > 1
    with pytest.raises(ValueError, match="other settings: privacy was"):  # more rounds need more noise
        private(privacy=settings, rounds=4, epochs=0, directory=tmp_path)


def test_clients_tell_nothing_but_their_update() -> None:
    engine = Recording()
    found = private("feddecomp", engine=engine, evaluate_every=1)
    for message in map(decode, engine.up):
        assert message.fields == {**message.fields, "samples": 1} and message.fields.keys() == {
            "client", "round", "capacity", "samples",
        }  # fmt: skip
    for event in found.history[1:]:
        assert event["loss"] is None and event["macs"] is None and "observed" not in event


def test_a_secret_seed_draws_other_cohorts_and_noise() -> None:
    one = private(privacy={"sampling": "fixed"}, rounds=1, epochs=0).federation

    def deployed(secret: int | None) -> Federation:
        return Federation(one.setup, one.rounds, one.engine, one.capacities, secret=secret)

    same, other = deployed(one.setup.training.seed), deployed(123456789)
    weights = [found.run().tensors["fc.weight"] for found in (deployed(None), same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert one.privacy and same.privacy and other.privacy
    assert one.privacy.cohort_of(0) == same.privacy.cohort_of(0) != other.privacy.cohort_of(0)
    assert one.journal.events[0]["privacy"]["seed"] == "run" and other.journal.events[0]["privacy"]["seed"] == "secret"
    assert "123456789" not in json.dumps([other.journal.events, other.settings()])


# What is refused.


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"evaluate_clients": "selected"}, "clients send their update only, and no scores"),
        ({"privacy": {"delta": 0.5}}, r"privacy.delta must be below 1 / 6"),
        ({"capacities": Capacities({1.0: 0.5, 0.5: 0.5}, dynamic=True, cover=True)}, "capacities.cover lets"),
        ({"fleet": Fleet({"d": Device("phone-mid")}, overselect=1.5)}, "fleet.overselect lets the first answers"),
        ({"aggregation": "median"}, "privacy counts means of whole cohorts"),
        ({"privacy": {"clip": "adaptive"}}, "an adaptive clip needs noise below 0.3, got 0.5"),
    ],
)
def test_settings_that_would_release_more(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        private(**settings)


def test_norm_statistics_are_refused_unless_they_stay_private() -> None:
    from fedfactor.testing import SmallNet

    with pytest.raises(ValueError, match=r"the running statistics of batch norms \(bn1\)"):
        private(model=SmallNet)
    with pytest.raises(ValueError, match="heterofl estimates norm statistics on the clients' data"):
        private("heterofl", model=SmallNet)
    assert private("fedbn", model=SmallNet).summary["privacy"]["epsilon"] > 0


def test_a_method_whose_fold_has_no_sums_is_refused() -> None:
    from fedfactor.protocol.method import Method

    class Odd(Method):
        name = "odd"

        def fold(self, server: Any, view: Any, networks: Any) -> Any:
            return object()

    one = private(rounds=1, epochs=0).federation
    one.setup.method = Odd()
    with pytest.raises(ValueError, match="the fold of odd, object, does not say which changes it sums"):
        Federation(one.setup, one.rounds, one.engine, one.capacities).run()


def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from fedfactor.server import accounting

    accounting._library.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"needs dp-accounting .*\[privacy\]"):
        private()
    monkeypatch.undo()
    accounting._library.cache_clear()
    assert Privacy(**PLAIN).noise == 0.5
