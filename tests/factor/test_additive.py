"""FedDecomp's sigma + B A: ranks, the permutation of the convolution, the authors' variants."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfactor.factor.additive import Additive
from fedfactor.factor.base import WeightShape


def test_matrix_by_hand() -> None:
    factors = {
        "sigma": torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]),
        "b": torch.tensor([[1.0], [2.0]]),
        "a": torch.tensor([[1.0, 10.0, 100.0]]),
    }
    # B A = [[1, 10, 100], [2, 20, 200]] is inputs x outputs; torch keeps outputs x inputs.
    assert Additive().compose(factors, WeightShape(3, 2)).tolist() == [[2, 2], [10, 21], [100, 200]]


def test_a_rank_one_product_touches_one_input_and_one_output() -> None:
    """Row (i, z) and column (o, w) of B A is entry (o, i, z, w) of the kernel; the plain view mixes channels."""
    shape, scheme = WeightShape(4, 3, (2, 2)), Additive(conv=0.34)
    factors = {name: torch.zeros(size) for name, size in scheme.shapes(shape).items()}
    factors["b"][1 * 2 + 1, 0] = 1.0  # input 1, row 1
    factors["a"][0, 2 * 2 + 0] = 1.0  # output 2, column 0
    assert scheme.low_rank(factors, shape).nonzero().tolist() == [[2, 1, 1, 0]]


@pytest.mark.parametrize(
    ("shape", "scheme", "rank"),
    [
        (WeightShape(10, 512), Additive(linear=0.6), 6),
        (WeightShape(10, 512), Additive(linear=0.01), 1),
        (WeightShape(128, 64, (3, 3)), Additive(conv=0.6), 38 * 3),
        (WeightShape(128, 64, (3, 3)), Additive(conv=0.6, rank_from_outputs=True), 76 * 3),
        (WeightShape(64, 3, (7, 7)), Additive(conv=0.8, rank_from_outputs=True), 357),
        (WeightShape(64, 3, (7, 7)), Additive(conv=0.8), 2 * 7),
        (WeightShape(8, 8, (5,)), Additive(conv=0.5), 4),
    ],
    ids=str,
)
def test_ranks(shape: WeightShape, scheme: Additive, rank: int) -> None:
    assert scheme.rank_of(shape) == rank
    assert scheme.shapes(shape)["a"][0] == rank


def test_the_authors_view_and_scaling() -> None:
    shape, scheme = (
        WeightShape(4, 2, (3, 3)),
        Additive(conv=0.5, plain_view=True, rank_from_outputs=True, scaled=True),
    )
    factors = {name: torch.randn(size) for name, size in scheme.shapes(shape).items()}
    assert factors["b"].shape == (12, 6) and factors["a"].shape == (6, 6)
    expected = (factors["b"] @ factors["a"]).view(4, 2, 3, 3) / 2
    torch.testing.assert_close(scheme.low_rank(factors, shape), expected)


@given(out=st.integers(1, 9), inp=st.integers(1, 9), kernel=st.sampled_from([(), (3,), (3, 3), (1, 2)]))
def test_starts_as_the_weight_with_a_gaussian_a_and_zero_b(out: int, inp: int, kernel: tuple[int, ...]) -> None:
    weight = torch.randn(out, inp, *kernel)
    factors = Additive().from_dense(weight, torch.Generator().manual_seed(0))
    assert torch.equal(Additive().compose(factors, WeightShape.of(weight)), weight)
    assert not factors["b"].any() and factors["a"].any()


def test_spread_of_a_is_the_one_stated() -> None:
    a = Additive().from_dense(torch.zeros(128, 64, 3, 3), torch.Generator().manual_seed(0))["a"]
    assert float(a.std()) == pytest.approx((3 * 64 * 3) ** -0.5, rel=0.02)
