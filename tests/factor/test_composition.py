"""FLANC's composition: one basis for all widths, two ways to run it, the orthogonality penalty."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fedfactor.factor import composition
from fedfactor.factor.base import ConvGeometry, Unfit, WeightShape
from fedfactor.factor.composition import Composition, orthogonality


def test_weight_by_hand() -> None:
    """S = 4 inputs in two groups of R1 = 2, R2 = 2 basis vectors, T = 1 output."""
    factors = {"v": torch.tensor([[1.0, 2.0], [3.0, 5.0]]), "u": torch.tensor([[1.0, 0.0, 2.0, -1.0]])}
    weight = Composition(r1=2, r2=2).compose(factors, WeightShape(1, 4))
    # group 1: 1 (1, 2) + 0 (3, 5); group 2: 2 (1, 2) - 1 (3, 5)
    assert weight.tolist() == [[1, 2, -1, -1]]


def test_the_basis_is_the_same_size_at_every_width() -> None:
    scheme = Composition(r1=8, r2=16)
    sizes = [scheme.shapes(WeightShape(w, w, (3, 3))) for w in (16, 32, 48, 64)]
    assert {size["v"] for size in sizes} == {(16, 8, 3, 3)}
    assert [size["u"] for size in sizes] == [(16, 32), (32, 64), (48, 96), (64, 128)]


@pytest.mark.parametrize("bank", [True, False])
@given(
    groups=st.integers(1, 3),
    r1=st.integers(1, 4),
    r2=st.integers(1, 5),
    out=st.integers(1, 6),
    stride=st.integers(1, 2),
)
def test_both_ways_to_run_agree(bank: bool, groups: int, r1: int, r2: int, out: int, stride: int) -> None:
    scheme, shape = Composition(r1=r1, r2=r2), WeightShape(out, groups * r1, (3, 3))
    factors = {name: torch.randn(size, dtype=torch.float64) for name, size in scheme.shapes(shape).items()}
    bias = torch.randn(out, dtype=torch.float64)
    x = torch.randn(2, shape.inp, 6, 5, dtype=torch.float64)
    geometry = ConvGeometry((stride, stride), (1, 1), (1, 1))
    expected = F.conv2d(x, scheme.compose(factors, shape), bias, stride, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition.Composition, "_bank_pays", lambda *_: bank)
        torch.testing.assert_close(scheme.forward(x, factors, shape, geometry, bias), expected)
        flat, matrix = torch.randn(2, 3, shape.inp, dtype=torch.float64), WeightShape(out, shape.inp)
        factors["v"] = factors["v"][:, :, 0, 0].contiguous()
        expected = F.linear(flat, scheme.compose(factors, matrix), bias)
        torch.testing.assert_close(scheme.forward(flat, factors, matrix, None, bias), expected)


def test_the_cheaper_way_is_counted() -> None:
    """64 -> 64 in groups of 16, eight 3 x 3 basis kernels, 100 positions: 4,608 + 2,048 a position against dense."""
    shape = WeightShape(64, 64, (3, 3))
    assert Composition(r1=16, r2=8).macs(shape, positions=100) == (64 * 8 * 9 + 4 * 8 * 64) * 100
    assert Composition(r1=1, r2=8).macs(shape, positions=100) == 64 * 64 * 9 * (100 + 8)


def test_penalty_by_hand() -> None:
    v = torch.tensor([[1.0, 1.0], [0.0, 2.0]])  # V V^T - I = [[1, 2], [2, 3]]
    assert float(orthogonality(v)) == pytest.approx(10 * 18 / 4)
    assert float(orthogonality(v, 1.0, reduction="sum")) == 18
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum', got 'maen'"):
        orthogonality(v, reduction="maen")  # type: ignore[arg-type]


def test_penalty_gradient_against_finite_differences() -> None:
    v = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(orthogonality, (v,))


def test_init_is_orthonormal_and_as_large_as_he() -> None:
    shape, scheme = WeightShape(256, 256, (3, 3)), Composition(r1=32, r2=64)
    factors = scheme.init(shape, torch.Generator().manual_seed(0))
    assert float(orthogonality(factors["v"])) < 1e-10
    assert float(scheme.compose(factors, shape).std()) == pytest.approx(shape.he_std, rel=0.05)


@given(
    groups=st.integers(1, 3),
    r1=st.integers(1, 4),
    out=st.integers(1, 5),
    kernel=st.sampled_from([(), (3, 3), (2,)]),
)
def test_a_full_basis_gives_the_weight_back(groups: int, r1: int, out: int, kernel: tuple[int, ...]) -> None:
    weight = torch.randn(out, groups * r1, *kernel, dtype=torch.float64)
    shape = WeightShape.of(weight)
    scheme = Composition(r1=r1, r2=r1 * shape.area)
    torch.testing.assert_close(scheme.compose(scheme.from_dense(weight), shape), weight)
    with pytest.warns(UserWarning, match="cannot be orthonormal"):
        larger = Composition(r1=r1, r2=r1 * shape.area + 1).from_dense(weight)
    torch.testing.assert_close(scheme.compose(larger, shape), weight)


def test_defaults_need_an_even_number_of_inputs() -> None:
    assert Composition().basis_of(WeightShape(64, 32, (3, 3))) == (16, 16)
    with pytest.raises(Unfit, match="3 inputs cannot be halved"):
        Composition().basis_of(WeightShape(64, 3, (3, 3)))
