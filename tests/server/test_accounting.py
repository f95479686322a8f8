"""Epsilon against published values and closed forms; `dp-accounting` computes all of it."""

from __future__ import annotations

import math
from statistics import NormalDist

import dp_accounting
import pytest
from dp_accounting import pld, rdp

from fedfactor.protocol.privacy import Privacy
from fedfactor.server.accounting import Release, Spending


def test_one_gaussian_release_has_its_closed_form() -> None:
    """Balle and Wang 2018, Theorem 8: delta = P(1 / 2s - e s) - exp(e) P(-1 / 2s - e s)."""
    for noise in (0.7, 1.0, 4.0):
        epsilon = Spending(Release("none", 10, 10), noise, 1e-5).after(1)
        below, factor = NormalDist().cdf, math.exp(epsilon)
        delta = below(0.5 / noise - epsilon * noise) - factor * below(-0.5 / noise - epsilon * noise)
        assert 0.99e-5 < delta <= 1e-5


def test_many_rounds_without_sampling_are_one_release_with_less_noise() -> None:
    release = Release("none", 10, 10)
    assert Spending(release, 6.0, 1e-5).after(9) == pytest.approx(Spending(release, 2.0, 1e-5).after(1), abs=2e-3)


@pytest.mark.parametrize(("noise", "epochs", "printed"), [(1.12, 60, 2.92), (0.6, 30, 9.74), (1.2, 10, 1.20)])
def test_the_table_of_dp_sgd_on_mnist(noise: float, epochs: int, printed: float) -> None:
    """TensorFlow Privacy, tutorials/README.md: batches of 256 out of 60,000, delta 1e-5.

    The table converts Renyi divergences by log(1 / delta) / (order - 1); today's accountant is tighter.
    """
    steps = epochs * 60000 // 256
    renyi = rdp.RdpAccountant()
    renyi.compose(dp_accounting.PoissonSampledDpEvent(256 / 60000, dp_accounting.GaussianDpEvent(noise)), steps)
    classic = min(renyi.rdp + math.log(1e5) / (renyi.orders - 1))
    assert classic == pytest.approx(printed, abs=0.06)
    found = Spending(Release("poisson", 256, 60000), noise, 1e-5).after(steps)
    assert 0.6 * printed < found <= renyi.get_epsilon(1e-5) < printed


def test_the_example_of_the_moments_accountant() -> None:
    """Abadi et al. 2016, Sec. 3.2: q = 0.01, sigma = 4, 10,000 steps and delta = 1e-5 give an epsilon of 1.26."""
    found = Spending(Release("poisson", 1, 100), 4.0, 1e-5).after(10_000)
    assert 0.9 < found < 1.26


def test_cohorts_of_a_fixed_size_are_not_counted_as_poisson() -> None:
    """All that is known of them holds for replaced data, which move the sum by two clips."""
    poisson, fixed = (Spending(Release(how, 10, 100), 2.0, 1e-5) for how in ("poisson", "fixed"))
    assert poisson.after(20) < fixed.after(20) < Spending(Release("none", 10, 100), 2.0, 1e-5).after(20) * 2
    assert "replaced" in fixed.release.neighbours and "added or removed" in poisson.release.neighbours
    everyone = Spending(Release("fixed", 10, 10), 2.0, 1e-5)
    assert everyone.after(1) == Spending(Release("none", 10, 10), 1.0, 1e-5).after(1)


def test_clients_that_add_the_noise_protect_against_replaced_data() -> None:
    local = Release.of(Privacy(clip=1.0, delta=1e-5, noise=2.0, where="client"), 5, 10)
    assert Spending(local, 2.0, 1e-5).after(3) == Spending(Release("none", 5, 10), 1.0, 1e-5).after(3)


def test_an_adaptive_clip_spends_what_its_two_noises_spend() -> None:
    """The noise on the sum and that on the number of clients, composed by dp-accounting, are the noise that counts."""
    settings = Privacy(clip="adaptive", delta=1e-5, noise=1.0)
    on_sum = settings.noise_on_sum(1.0, cohort=40)
    both = [dp_accounting.GaussianDpEvent(on_sum), dp_accounting.GaussianDpEvent(2 * 40 / 20)]
    accountant = pld.PLDAccountant().compose(dp_accounting.ComposedDpEvent(both))
    assert accountant.get_epsilon(1e-5) == pytest.approx(Spending(Release("none", 1, 1), 1.0, 1e-5).after(1), abs=2e-3)


def test_the_noise_is_solved_for() -> None:
    release = Release("none", 10, 100)
    noise = release.solved(4.0, 1e-6, 10)
    assert Spending(release, noise, 1e-6).after(10) <= 4.0 < Spending(release, noise - 0.001, 1e-6).after(10)


def test_the_rounds_that_fit_a_budget() -> None:
    spending = Spending(Release("none", 10, 10), 5.0, 1e-5)
    fits = spending.rounds_within(2.0, 100)
    assert spending.after(fits) <= 2.0 < spending.after(fits + 1)
    assert spending.rounds_within(None, 100) == spending.rounds_within(1e6, 100) == 100
    assert spending.rounds_within(0.01, 100) == 0


def test_nothing_is_spent_before_the_first_round_and_no_noise_protects_nobody() -> None:
    release = Release("poisson", 1, 10)
    assert Spending(release, 1.0, 1e-5).after(0) == 0.0
    assert Spending(release, 0.0, 1e-5).after(1) == math.inf
