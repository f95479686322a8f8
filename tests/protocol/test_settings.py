"""Schedules, capacities and cohorts by hand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from fedfactor.methods import FedAvg
from fedfactor.protocol.local_optimizer import LocalOptimizer
from fedfactor.protocol.settings import Capacities, Rounds, Schedule, Training
from tests.helpers.tiny import run


def sgd(**table: object) -> LocalOptimizer:
    return LocalOptimizer.of({"name": "sgd", **table})


def test_schedules() -> None:
    assert [Schedule().rate(0.1, t, 10) for t in (0, 9)] == [0.1, 0.1]
    assert Schedule("exponential", decay=0.992).rate(0.1, 3, 10) == pytest.approx(0.1 * 0.992**3)
    steps = Schedule("multistep", decay=0.1, milestones=(2, 4))
    assert [steps.rate(1.0, t, 6) for t in range(6)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    cosine = Schedule("cosine", floor=1e-4)
    assert cosine.rate(0.1, 0, 8) == pytest.approx(0.1)
    assert cosine.rate(0.1, 4, 8) == pytest.approx((0.1 + 1e-4) / 2)
    assert cosine.rate(0.1, 8, 8) == pytest.approx(1e-4)
    with pytest.raises(
        ValueError, match="Schedule: kind should be 'constant', 'exponential', 'multistep', 'cosine' or 'one_cycle'"
    ):
        Schedule("linear")  # type: ignore[arg-type]


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def test_a_schedule_needs_a_learning_rate() -> None:
    chosen = LocalOptimizer.of(WithoutRate)
    assert Training(optimizer=chosen).lr == 0
    for given in ({"schedule": "one_cycle"}, {"local_schedule": "cosine"}, {"schedule": Schedule(warmup=3)}):
        with pytest.raises(ValueError, match="WithoutRate has no learning rate that could change"):
            Training(optimizer=chosen, **given)  # type: ignore[arg-type]


def test_warm_up_rises_to_the_full_rate_and_shifts_the_schedule_after_it() -> None:
    """Milestones stay rounds of the run."""
    rise = [0.25, 0.5, 0.75]
    assert [Schedule(warmup=3).rate(1.0, t, 5) for t in range(5)] == [*rise, 1.0, 1.0]
    cosine = Schedule("cosine", warmup=3)
    assert [cosine.rate(1.0, t, 7) for t in range(7)] == [
        *rise,
        *(Schedule("cosine").rate(1.0, t, 4) for t in range(4)),
    ]
    assert [Schedule("exponential", decay=0.5, warmup=3).rate(1.0, t, 6) for t in range(6)] == [*rise, 1.0, 0.5, 0.25]
    steps = Schedule("multistep", decay=0.5, milestones=(4,), warmup=3)
    assert [steps.rate(1.0, t, 6) for t in range(6)] == [*rise, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(("rounds", "share"), [(10, 0.3), (7, 0.5), (2, 0.3), (40, 0.1)])
def test_one_cycle_is_torchs(rounds: int, share: float) -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=rounds, pct_start=share, div_factor=10.0)
    expected = []
    for _ in range(rounds):
        expected.append(theirs.get_last_lr()[0])
        sgd.step()
        if len(expected) < rounds:
            theirs.step()
    ours = Schedule("one_cycle", pct_start=share, div_factor=10.0)
    assert [ours.rate(0.1, t, rounds) for t in range(rounds)] == pytest.approx(expected)
    assert Training(schedule="one_cycle").looks_ahead


def test_defaults_of_the_rate_and_the_decay_are_the_optimizers() -> None:
    assert (Training().lr, Training().momentum, Training().weight_decay, Training().epochs) == (0.1, 0.0, 0.0, 1)
    adamw = Training(optimizer="adamw")
    assert (adamw.lr, adamw.momentum, adamw.weight_decay) == (0.001, 0.0, 0.01)
    assert (Training(optimizer=sgd(lr=0.3, momentum=0.5)), Training(lr=0.3)) == (
        Training(lr=0.3, momentum=0.5),
        Training(lr=0.3),
    )
    assert Training(optimizer="rmsprop", momentum=0.5).momentum == 0.5
    assert Training(optimizer="adam", momentum=0.0) == Training(optimizer="adam")


@pytest.mark.parametrize(
    ("training", "length", "batches", "seen"),
    [
        (Training(batch_size=10, epochs=2), 2, 6, 50),
        (Training(batch_size=10, epochs=0.5), 0.5, 2, 20),  # two of three batches
        (Training(batch_size=10, epochs=1.7), 1.7, 6, 50),
        (Training(batch_size=2, epochs=0.7), 0.7, 9, 18),  # 12 batches, the last of 3; 8.4 is rounded up
        (Training(batch_size=10, local_steps=4), 4, 4, 35),
        (Training(batch_size=10, local_steps=2, accumulate=3), 2, 6, 50),
        (Training(batch_size=1, epochs=0.1), 0.1, 3, 3),  # 24 batches, the last of 2
        (Training(epochs=0), 0, 0, 0),
    ],
)
def test_lengths_count_batches_and_examples(training: Training, length: float, batches: int, seen: int) -> None:
    assert training.length == length
    assert (training.batches(25, length), training.seen(25, length)) == (batches, seen)


def test_static_capacities_hold_their_shares_exactly() -> None:
    capacities = Capacities({0.25: 1, 0.5: 1, 1.0: 2})
    counts = Counter(int(level) for level in capacities.assign(0, 100))
    assert [counts[i] for i in range(3)] == [50, 25, 25]  # levels 1, .5, .25
    assert list(capacities.assign(0, 100)) == list(capacities.assign(0, 100))
    assert list(capacities.assign(0, 100)) != list(capacities.assign(1, 100))


def test_dynamic_capacities_follow_their_shares() -> None:
    capacities = Capacities({0.2: 0.6, 0.4: 0.4}, dynamic=True)
    drawn = Counter(capacities.redraw(0, t, c) for t in range(40) for c in range(50))
    assert drawn[0.2] / 2000 == pytest.approx(0.6, abs=0.04)


def test_cohorts() -> None:
    assert sorted(Rounds(cohort=1.0).cohort_of(0, 3, 7)) == list(range(7))
    assert len(Rounds(cohort=0.16).cohort_of(0, 0, 100)) == 16
    assert Rounds(cohort=4).cohort_of(0, 1, 50) != Rounds(cohort=4).cohort_of(0, 2, 50)
    with pytest.raises(ValueError, match="a cohort of 8 cannot be drawn from 7"):
        Rounds(cohort=8).cohort_of(0, 0, 7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Training(lr=-1), "Training: lr should be at least 0, got -1"),
        (lambda: Training(dtype="float8"), "dtype should be 'float32', 'float64' or 'bfloat16'"),
        (lambda: Capacities({1.5: 1.0}), "Capacities: each key of shares should be at most 1, got {1.5: 1.0}"),
        (lambda: Capacities({0.5: 0.0}), "Capacities: shares should be greater than 0, got {0.5: 0.0}"),
        (lambda: Rounds(cohort=1.5), "Rounds: cohort should be a whole number or at most 1, got 1.5"),
        (lambda: Rounds(quorum=0.0), "Rounds: quorum should be greater than 0, got 0.0"),
        (lambda: Capacities({}), "Capacities: shares: .* at least 1 item"),
        (lambda: Training(device="gpu"), "Training: device must be cpu, cuda, cuda:1"),
        (lambda: Training(batch=3), "unexpected keyword argument 'batch'"),  # type: ignore[call-arg]
        (lambda: run(round=3), "has no parameter 'round'; did you mean 'rounds'"),
        (lambda: run("scaffold"), "no method is called 'scaffold'"),
        (lambda: Training(epochs=-0.5), "epochs should be a whole number or at least 0, got -0.5"),
        (lambda: Training(epochs=math.inf), "epochs should be a whole number or a finite number, got inf"),
        (lambda: Training(epochs=1, local_steps=2), "epochs and local_steps both say how long a client trains"),
        (lambda: Training(local_steps=0), "local_steps should be at least 1, got 0"),
        (lambda: Training(accumulate=0), "accumulate should be at least 1, got 0"),
        (lambda: Training(precision="bf16"), "precision should be 'full' or 'bf16-mixed'"),  # type: ignore[arg-type]
        (lambda: Training(precision="bf16-mixed", dtype="float64"), "'bf16-mixed' needs dtype float32, got float64"),
        (lambda: Training(optimizer="adam", momentum=0.9), "momentum: the optimizer adam has none; leave it out"),
        (lambda: Training(optimizer=sgd(lr=1.0), lr=2.0), "lr and optimizer.lr are the same setting; give one"),
        (lambda: Training(optimizer=sgd(lr="x")), "optimizer.lr should be a number of at least 0, got 'x'"),
        (lambda: Training(optimizer=sgd(nesterov=True)), "nesterov needs a momentum above 0, and no dampening"),
        (lambda: Training(optimizer=sgd(keep_state=True)), "sgd without momentum has no state to keep"),
        (lambda: Schedule("one_cycle", warmup=3), "one_cycle has a warm-up of its own, pct_start: leave out warmup"),
        (lambda: Training(lr=math.nan), "lr should be a finite number, got nan"),
        (lambda: Training(momentum=2.0), "momentum should be at most 1, got 2.0"),
        (lambda: Training(schedule="linear"), "schedule should be a Schedule or 'constant', 'exponential'"),  # type: ignore[arg-type]
        (lambda: Rounds(rounds=2.5), "rounds should be a whole number, got 2.5"),  # type: ignore[arg-type]
        (lambda: Rounds(evaluate_clients="every"), "evaluate_clients should be 'none', 'selected' or 'all'"),  # type: ignore[arg-type]
        (lambda: Capacities([1.0]), "Capacities: shares should be a table"),  # type: ignore[arg-type]
        (lambda: run(cohort=9), "a cohort of 9 cannot be drawn from 6 clients"),
        (lambda: run(FedAvg), "give an object, FedAvg()"),
    ],
)
def test_bad_settings_say_what_is_legal(make: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    "setting",
    [{"momentum": 0.9}, {"weight_decay": 0.1}, {"max_grad_norm": 0.01}, {"lr": 0.1}, {"batch_size": 7}, {"epochs": 2}],
    ids=str,
)
def test_every_training_setting_acts(setting: dict[str, float]) -> None:
    assert run(**setting).summary["weights_sha256"] != run().summary["weights_sha256"]


def test_those_measured_for_all_are_always_the_same() -> None:
    assert Rounds().measured(0, 4) == [0, 1, 2, 3]
    some = Rounds(evaluate_limit=10).measured(0, 1_000_000)
    assert some == Rounds(evaluate_limit=10).measured(0, 1_000_000) == sorted(set(some))
    assert len(some) == 10 and some != Rounds(evaluate_limit=10).measured(1, 1_000_000)
    assert Rounds(evaluate_limit=10).measured(0, 7) == list(range(7))


def test_cover_draws_again_until_each_level_occurs() -> None:
    """Four levels among five clients: most first draws lack one, the covering draw never does."""
    shares = {0.25: 1, 0.5: 1, 0.75: 1, 1.0: 1}
    cover, plain = Capacities(shares, dynamic=True, cover=True), Capacities(shares, dynamic=True)
    cohort, attempts = range(5), []
    for round in range(30):
        attempts.append(cover.covering_attempt(3, round, cohort))
        found = [cover.redraw(3, round, client, attempts[-1]) for client in cohort]
        assert {*found} == {*shares}
        assert attempts[-1] or found == [plain.redraw(3, round, client) for client in cohort]
        assert plain.covering_attempt(3, round, cohort) == 0
    assert len({*attempts}) > 3
    with pytest.raises(ValueError, match="cover draws capacities again, so it needs dynamic = true"):
        Capacities(shares, cover=True)
    with pytest.raises(ValueError, match="3 clients per round cannot have each of the 4 levels"):
        cover.covering_attempt(3, 0, range(3))


@pytest.mark.parametrize(("rounds", "times"), [(0, 0), (1, 1), (20, 20), (21, 11), (40, 20), (41, 14), (1000, 20)])
def test_a_run_is_evaluated_at_most_twenty_times_and_at_its_end(rounds: int, times: int) -> None:
    due = [round for round in range(1, rounds + 1) if Rounds(rounds).due(round)]
    assert len(due) == times and due[-1:] == ([rounds] if rounds else [])
    assert all(Rounds(rounds, evaluate_every=1).due(round) for round in range(1, rounds + 1))
    assert [round for round in range(1, rounds + 1) if Rounds(rounds, evaluate_every=0).due(round)] == due[-1:]
