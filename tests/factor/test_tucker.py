"""Low rank and Tucker: hand-computed products, counts and the closest factors of a given weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fedfactor.factor.base import ConvGeometry, WeightShape
from fedfactor.factor.tucker import LowRank


def test_matrix_product_by_hand() -> None:
    factors = {"x": torch.tensor([[1.0], [2.0]]), "y": torch.tensor([[3.0, 4.0]])}
    assert LowRank(rank=1).compose(factors, WeightShape(2, 2)).tolist() == [[3, 4], [6, 8]]


def test_kernel_by_hand_is_a_sum_over_blocks() -> None:
    shape = WeightShape(1, 2, (1, 1))
    factors = {
        "x": torch.tensor([[1.0, 10.0]]),
        "t": torch.tensor([2.0, 3.0]).view(2, 1, 1, 1),
        "y": torch.tensor([[1.0, 1.0], [0.0, 1.0]]),
    }
    # block 1: 1 * 2 * (1, 1); block 2: 10 * 3 * (0, 1)
    assert LowRank(rank=1, blocks=2).compose(factors, shape).flatten().tolist() == [2, 32]


def test_table_1_counts_a_sum_of_two_blocks() -> None:
    """FedPara Table 1, m = n = O = I = 256, K = 3, R = 16: 2R(m + n) = 16K and 2R(O + I + R K^2) = 21K."""
    assert LowRank(rank=32).parameters(WeightShape(256, 256)) == 16_384
    assert LowRank(rank=32, blocks=2).parameters(WeightShape(256, 256, (3, 3))) == 20_992
    assert LowRank(rank=32).parameters(WeightShape(256, 256, (3, 3))) == 25_600


@given(
    out=st.integers(1, 9),
    inp=st.integers(1, 9),
    k=st.integers(1, 3),
    stride=st.integers(1, 2),
    blocks=st.integers(1, 2),
)
def test_running_the_factors_equals_convolving_with_the_composed_weight(
    out: int, inp: int, k: int, stride: int, blocks: int
) -> None:
    shape, scheme = WeightShape(out, inp, (k, k)), LowRank(ratio=1.0, blocks=blocks)
    factors = {n: f.double() for n, f in scheme.init(shape, torch.Generator().manual_seed(0)).items()}
    x = torch.randn(2, inp, 7, 6, dtype=torch.float64)
    geometry = ConvGeometry((stride, 1), (1, 2), (1, 1))
    expected = F.conv2d(x, scheme.compose(factors, shape), None, (stride, 1), (1, 2))
    torch.testing.assert_close(scheme.forward(x, factors, shape, geometry), expected)


@given(out=st.integers(1, 8), inp=st.integers(1, 8), kernel=st.sampled_from([(), (3,), (1, 1), (3, 2)]))
def test_full_rank_gives_the_weight_back(out: int, inp: int, kernel: tuple[int, ...]) -> None:
    weight = torch.randn(out, inp, *kernel, dtype=torch.float64)
    scheme = LowRank(ratio=1.0)
    composed = scheme.compose(scheme.from_dense(weight), WeightShape.of(weight))
    torch.testing.assert_close(composed, weight)


@pytest.mark.parametrize(
    "shape", [WeightShape(200, 300), WeightShape(96, 64, (3, 3)), WeightShape(64, 64, (5,))], ids=str
)
@pytest.mark.parametrize("blocks", [1, 2])
def test_init_has_the_standard_deviation_of_he(shape: WeightShape, blocks: int) -> None:
    scheme = LowRank(ratio=0.25, blocks=blocks)
    weight = scheme.compose(scheme.init(shape, torch.Generator().manual_seed(1)), shape)
    assert float(weight.std()) == pytest.approx(shape.he_std, rel=0.15)


def test_blocks_have_no_closed_form() -> None:
    with pytest.raises(ValueError, match="no closed form"):
        LowRank(rank=2, blocks=2).from_dense(torch.randn(4, 4, 3, 3))
