from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv1d, conv2d, linear

from fedfactor.factor.base import ConvGeometry, Unfit, WeightShape
from fedfactor.factor.spectral import ChannelSplit, SpatialSplit, SpectralSplit, frobenius_decay, spectrum

SCHEMES = [SpatialSplit(), ChannelSplit()]
BOTH = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


def randn(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def full_rank(scheme: SpectralSplit, shape: WeightShape) -> SpectralSplit:
    if isinstance(scheme, SpatialSplit) and shape.kernel:
        return SpatialSplit(rank=min(shape.out * shape.kernel[0], shape.inp * shape.kernel[1]))
    return type(scheme)(rank=min(shape.out, shape.fan_in))


def test_pufferfish_example() -> None:
    weight = torch.tensor([[3.0, 0.0], [4.0, 5.0]])
    for scheme in SCHEMES:
        factors = scheme.from_dense(weight)
        # sqrt(sigma_1) u_1 and sqrt(sigma_1) v_1, up to one common sign
        sign = factors["v"][0, 0].sign()
        torch.testing.assert_close(sign * factors["u"], torch.tensor([[0.819036], [2.457109]]))
        torch.testing.assert_close(sign * factors["v"], torch.tensor([[1.831421, 1.831421]]))
        composed = scheme.compose(factors, WeightShape(2, 2))
        torch.testing.assert_close(composed, torch.tensor([[1.5, 1.5], [4.5, 4.5]]))
        assert spectrum(factors).tolist() == pytest.approx([6.708204])


def test_spatial_unrolling_by_hand() -> None:
    # An outer product of a column over (out, row) and a row over (inp, column): FedHM's matrix has rank 1.
    a, b = randn(4, 3), randn(5, 3, seed=1)
    weight = torch.einsum("oy,ix->oiyx", a, b)
    scheme = SpatialSplit(rank=1)
    factors = scheme.from_dense(weight)
    torch.testing.assert_close(scheme.compose(factors, WeightShape.of(weight)), weight, rtol=1e-5, atol=1e-6)
    ratio = factors["u"][:, 0, :, 0] / a
    torch.testing.assert_close(ratio, ratio[0, 0].expand(4, 3), rtol=1e-4, atol=0)


def test_sizes_and_counts() -> None:
    shape = WeightShape(64, 32, (3, 3))
    spatial, channel = SpatialSplit(), ChannelSplit()
    assert spatial.shapes(shape) == {"u": (64, 32, 3, 1), "v": (32, 32, 1, 3)}
    assert channel.shapes(shape) == {"u": (64, 32, 1, 1), "v": (32, 32, 3, 3)}
    assert spatial.parameters(shape) == 32 * 3 * (64 + 32)
    assert channel.parameters(shape) == 32 * (32 * 9 + 64)
    assert spatial.shapes(WeightShape(10, 6)) == {"u": (10, 3), "v": (3, 6)}
    assert channel.shapes(WeightShape(10, 6)) == {"u": (10, 3), "v": (3, 6)}
    assert ChannelSplit().shapes(WeightShape(8, 6, (5,))) == {"u": (8, 4, 1), "v": (4, 6, 5)}
    assert SpatialSplit().shapes(WeightShape(8, 6, (5, 3))) == {"u": (8, 4, 5, 1), "v": (4, 6, 1, 3)}


def test_fedhm_resnet18_parameters() -> None:
    # Dense ResNet-18 has 11,173,962 parameters; FedHM at 1/2, 1/4, 1/8 has these, its first block whole.
    sizes = [(64, 64)] * 2
    for width in (128, 256, 512):
        sizes += [(width, width // 2), *[(width, width)] * 3]
    shapes = [WeightShape(out, inp, (3, 3)) for out, inp in sizes]
    rest = 11_173_962 - sum(shape.numel for shape in shapes)
    counts = [rest + sum(SpatialSplit(1 / f).parameters(shape) for shape in shapes) for f in (2, 4, 8)]
    assert counts == [4_157_514, 2_209_866, 1_236_042]


def test_pufferfish_resnet18_parameters() -> None:
    sizes = [(64, 64)] * 2
    for width in (128, 256, 512):
        sizes += [(width, width // 2), *[(width, width)] * 3]
    shapes = [WeightShape(out, inp, (3, 3)) for out, inp in sizes]
    saved = sum(shape.numel - ChannelSplit(0.25, rounding="floor").parameters(shape) for shape in shapes)
    assert saved == 11_173_834 - 3_336_138


def test_rank_rules() -> None:
    shape = WeightShape(30, 20, (3, 3))
    assert SpatialSplit(1 / 12).rank_of(WeightShape(512, 512, (3, 3))) == 43
    assert SpatialSplit(0.001).rank_of(shape) == 1
    assert SpatialSplit(1.0).rank_of(WeightShape(64, 3, (3, 3))) == 9, "capped at the rank of the unrolled matrix"
    assert ChannelSplit(0.1).rank_of(shape) == 3, "0.1 * 30 is 3.0000000000000004"
    assert ChannelSplit(0.11).rank_of(shape) == 4
    assert ChannelSplit(0.13, rounding="floor").rank_of(shape) == 3
    assert ChannelSplit(0.13, rounding="round").rank_of(shape) == 4
    assert ChannelSplit(0.01, rounding="floor").rank_of(shape) == 1


def test_bad_parameters_name_the_legal_range() -> None:
    shape = WeightShape(4, 2, (3, 3))
    with pytest.raises(ValueError, match=r"rank must lie in \[1, 6\], got 7"):
        SpatialSplit(rank=7).shapes(shape)
    with pytest.raises(ValueError, match=r"rank must lie in \[1, 4\], got 5"):
        ChannelSplit(rank=5).shapes(shape)
    for scheme in (SpatialSplit(0.0), ChannelSplit(1.5), SpatialSplit(float("nan"))):
        with pytest.raises(ValueError, match=r"ratio must lie in \(0, 1\]"):
            scheme.shapes(shape)
    with pytest.raises(ValueError, match="rounding must be"):
        ChannelSplit(rounding="up").shapes(shape)
    with pytest.raises(Unfit, match="use ChannelSplit"):
        SpatialSplit().shapes(WeightShape(4, 2, (3,)))


@BOTH
@settings(max_examples=25, deadline=None)
@given(
    out=st.integers(1, 7),
    inp=st.integers(1, 7),
    kernel=st.sampled_from([(), (1, 1), (3, 3), (1, 3), (2, 5)]),
    seed=st.integers(0, 99),
)
def test_full_rank_gives_the_weight_back(
    scheme: SpectralSplit, out: int, inp: int, kernel: tuple[int, ...], seed: int
) -> None:
    weight = randn(out, inp, *kernel, seed=seed)
    shape = WeightShape.of(weight)
    scheme = full_rank(scheme, shape)
    factors = scheme.from_dense(weight)
    assert {name: tuple(factor.shape) for name, factor in factors.items()} == scheme.shapes(shape)
    assert all(factor.is_contiguous() for factor in factors.values())
    torch.testing.assert_close(scheme.compose(factors, shape), weight, rtol=1e-5, atol=1e-5)


@BOTH
@pytest.mark.parametrize("size", [(64, 32, 3, 3), (96, 96, 3, 3), (80, 90)])
def test_error_and_spectrum_of_the_split(scheme: SpectralSplit, size: tuple[int, ...]) -> None:
    weight = randn(*size)
    shape = WeightShape.of(weight)
    factors = scheme.from_dense(weight)
    values = torch.linalg.svdvals(scheme._unroll(weight))
    rank = scheme.rank_of(shape)
    error = (scheme.compose(factors, shape) - weight).norm()
    assert values[rank:].norm() * 0.9999 <= error <= 1.01 * values[rank:].norm()
    torch.testing.assert_close(spectrum(factors), values[:rank], rtol=0.02, atol=0)
    # both factors carry the root of the singular values
    torch.testing.assert_close(factors["u"].norm(), factors["v"].norm())


@BOTH
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (3, 5), (4, 1)])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation"),
    [((1, 1), (1, 1), (1, 1)), ((2, 1), (0, 2), (1, 1)), ((2, 3), (2, 1), (1, 2)), ((1, 2), (3, 0), (2, 1))],
)
def test_two_convolutions_are_the_composed_one(
    scheme: SpectralSplit,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> None:
    shape = WeightShape(6, 5, kernel)
    factors = scheme.init(shape, torch.Generator().manual_seed(0))
    x, bias = randn(2, 5, 13, 12), randn(6)
    got = scheme.forward(x, factors, shape, ConvGeometry(stride, padding, dilation), bias)
    want = conv2d(x, scheme.compose(factors, shape), bias, stride, padding, dilation)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_channel_split_of_one_axis() -> None:
    scheme, shape = ChannelSplit(), WeightShape(6, 5, (3,))
    factors = scheme.from_dense(randn(6, 5, 3))
    x = randn(2, 5, 13)
    got = scheme.forward(x, factors, shape, ConvGeometry((2,), (2,), (2,)))
    torch.testing.assert_close(got, conv1d(x, scheme.compose(factors, shape), None, 2, 2, 2))


@BOTH
def test_two_linear_layers_are_the_composed_one(scheme: SpectralSplit) -> None:
    shape = WeightShape(6, 8)
    factors = scheme.init(shape, torch.Generator().manual_seed(0))
    x, bias = randn(2, 3, 8), randn(6)
    want = linear(x, scheme.compose(factors, shape), bias)
    torch.testing.assert_close(scheme.forward(x, factors, shape, bias=bias), want)


@BOTH
@pytest.mark.parametrize("std", [None, 0.3])
@pytest.mark.parametrize("kernel", [(), (3, 3)])
def test_initial_deviation(scheme: SpectralSplit, kernel: tuple[int, ...], std: float | None) -> None:
    shape = WeightShape(160, 120, kernel)
    factors = scheme.init(shape, torch.Generator().manual_seed(0), std=std)
    want = math.sqrt(2 / (120 * math.prod(kernel))) if std is None else std
    assert scheme.compose(factors, shape).std().item() == pytest.approx(want, rel=0.03)
    again = scheme.init(shape, torch.Generator().manual_seed(0), std=std)
    assert all(torch.equal(again[name], factor) for name, factor in factors.items())


def test_macs_by_hand() -> None:
    # 4 x 4 output pixels; FedHM: 2 channels of 3 x 3 inputs, then 5 of 3 x 2; PriSM: 2 of 27, then 5 of 2.
    shape = WeightShape(5, 3, (3, 3))
    assert SpatialSplit(rank=2).macs(shape, 16) == 16 * (2 * 9 + 5 * 6) == 768
    assert ChannelSplit(rank=2).macs(shape, 16) == 16 * (2 * 27 + 5 * 2) == 1024
    assert ChannelSplit(rank=2).macs(WeightShape(5, 3), 1) == 2 * 3 + 5 * 2


@BOTH
@pytest.mark.parametrize("size", [(4, 3, 3, 3), (6, 5, 2, 3), (7, 4)])
def test_frobenius_decay_is_half_the_squared_norm(scheme: SpectralSplit, size: tuple[int, ...]) -> None:
    shape = WeightShape(size[0], size[1], size[2:])
    sizes = scheme.shapes(shape)
    u = randn(*sizes["u"], seed=1, dtype=torch.float64).requires_grad_()
    v = randn(*sizes["v"], seed=2, dtype=torch.float64).requires_grad_()
    composed = scheme.compose({"u": u, "v": v}, shape)
    penalty = frobenius_decay(u, v)
    torch.testing.assert_close(penalty, 0.5 * composed.square().sum())
    assert torch.autograd.gradcheck(frobenius_decay, (u, v))
    (gradient,) = torch.autograd.grad(penalty, u)
    U, V = u.movedim(1, -1).reshape(-1, u.shape[1]), v.flatten(1).T
    want = (U @ (V.T @ V)).reshape(u.movedim(1, -1).shape).movedim(-1, 1)
    torch.testing.assert_close(gradient, want)
    assert gradient.abs().min() > 0


def test_frobenius_decay_by_hand() -> None:
    # U V^T = [[3, 6], [4, 8]]: half of 9 + 36 + 16 + 64.
    assert frobenius_decay(torch.tensor([[3.0], [4.0]]), torch.tensor([[1.0, 2.0]])).item() == 62.5
