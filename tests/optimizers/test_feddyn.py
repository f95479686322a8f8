"""FedDyn by hand."""

from __future__ import annotations

import pytest

from fedfactor.optimizers import FedDyn
from tests.helpers.quadratic import clients, run, state, x


def test_feddyn_two_rounds() -> None:
    one = run(FedDyn(alpha=0.1))
    assert x(one) == pytest.approx(-0.169)
    assert (state(one, 0), state(one, 1)) == (pytest.approx(-0.0189), pytest.approx(0.0358))
    assert float(one.server.optimizer["h"]["x"]) == pytest.approx(0.00845)
    two = run(FedDyn(alpha=0.1), rounds=2)
    assert x(two) == pytest.approx(-0.327221, abs=1e-6)
    assert float(two.server.optimizer["h"]["x"]) == pytest.approx(0.012136, abs=1e-6)


def test_feddyn_nearly_solves_its_local_problem_with_many_steps() -> None:
    """Exact local solutions with alpha = 1 are (1/2, -2/3), so x = -1/6, then -1/4."""
    assert x(run(FedDyn(alpha=1.0), epochs=400)) == pytest.approx(-1 / 6, abs=1e-6)
    assert x(run(FedDyn(alpha=1.0), epochs=400, rounds=2)) == pytest.approx(-1 / 4, abs=1e-6)


def test_feddyn_divides_by_the_population_when_a_client_sits_out() -> None:
    """h is the mean of all clients' g_i, those that never took part counting as zero."""
    data = clients((1.0, 1.0), (2.0, -1.0), (1.0, 3.0))
    result = run(FedDyn(alpha=1.0), rounds=3, data=data, cohort=2)
    kept = [state(result, c) if result.federation.store.read("client", c) else 0.0 for c in range(3)]
    assert float(result.server.optimizer["h"]["x"]) == pytest.approx(sum(kept) / 3)


@pytest.mark.parametrize("codec", ["fedpaq", "float16", "int8"])
def test_feddyn_measures_what_the_server_decodes(codec: str) -> None:
    result = run(FedDyn(alpha=1.0), rounds=4, codec=codec)
    assert float(result.server.optimizer["h"]["x"]) == pytest.approx(
        (state(result, 0) + state(result, 1)) / 2, abs=1e-12
    )


def test_feddyn_finds_the_optimum() -> None:
    assert x(run(FedDyn(alpha=1.0), rounds=300)) == pytest.approx(-1 / 3, abs=1e-3)
