"""SCAFFOLD by hand."""

from __future__ import annotations

import pytest

from fedfactor.optimizers import Scaffold
from tests.helpers.quadratic import Point, clients, run, state, x


def test_scaffold_two_rounds_so_that_the_control_variates_act() -> None:
    one = run(Scaffold())
    assert x(one) == pytest.approx(-0.085)
    assert (state(one, 0), state(one, 1)) == (pytest.approx(-0.95), pytest.approx(1.8))
    assert float(one.server.optimizer["c"]["x"]) == pytest.approx(0.425)
    two = run(Scaffold(), rounds=2)
    assert x(two) == pytest.approx(-0.1535, abs=5e-5)
    assert (state(two, 0), state(two, 1)) == (
        pytest.approx(-1.0995, abs=5e-5),
        pytest.approx(1.7845, abs=5e-5),
    )
    assert float(two.server.optimizer["c"]["x"]) == pytest.approx(0.3425, abs=5e-5)


def test_the_servers_step_scales_the_mean_change_and_not_the_model() -> None:
    assert x(run(Scaffold(server_lr=0.5), model=Point(1.0))) == pytest.approx(1 + 0.5 * ((1 + 0.28) / 2 - 1))


def test_scaffold_finds_the_optimum_that_fedavg_misses() -> None:
    assert x(run(Scaffold(), rounds=200)) == pytest.approx(-1 / 3, abs=1e-3)
    assert x(run(rounds=200)) != pytest.approx(-1 / 3, abs=1e-3)


def test_scaffold_divides_by_the_population_and_keeps_its_invariant() -> None:
    """c - mean(c_i) stays 0, also when one of three clients sits out: dividing by the cohort would break it.

    So would control variates that start as the model's weights, which are not zero here.
    """
    data = clients((1.0, 1.0), (2.0, -1.0), (1.0, 3.0))
    result = run(Scaffold(), rounds=3, data=data, cohort=2, model=Point(1.0))
    kept = [state(result, c) if result.federation.store.read("client", c) else 0.0 for c in range(3)]
    assert float(result.server.optimizer["c"]["x"]) == pytest.approx(sum(kept) / 3)


def test_scaffold_uses_the_rate_of_the_round_and_counts_steps() -> None:
    """With a decaying rate c_i still is the mean gradient along the path: at a fixed point of x it equals f_i'."""
    from fedfactor.protocol.settings import Schedule

    result = run(Scaffold(), rounds=300, schedule=Schedule("exponential", decay=0.995))
    assert x(result) == pytest.approx(-1 / 3, abs=2e-2)
    assert state(result, 0) == pytest.approx(-4 / 3, abs=5e-2)


def test_scaffold_is_stable_with_momentum() -> None:
    settings = {"epochs": 10, "lr": 0.005, "momentum": 0.9}
    assert x(run(Scaffold(), rounds=300, **settings)) == pytest.approx(-1 / 3, abs=1e-2)
