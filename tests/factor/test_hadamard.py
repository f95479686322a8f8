"""FedPara's Hadamard product: composition, ranks, start, the layer's forward, the Jacobian correction."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedfactor.factor.base import ConvGeometry, Factors, Scheme, Unfit, WeightShape, convolve
from fedfactor.factor.hadamard import Hadamard, jacobian_correction
from fedfactor.factor.tucker import LowRank

CHANNELS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
VGG16 = [WeightShape(o, i, (3, 3)) for i, o in dict.fromkeys(pairwise(CHANNELS))]
KERNELS = [(), (3,), (1, 1), (3, 3), (3, 2)]
VARIANTS = [{}, {"tanh": True}, {"personal": True}]


def draw(scheme: Hadamard, shape: WeightShape, seed: int = 0) -> Factors:
    """Draw standard normal factors in double precision."""
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in scheme.shapes(shape).items()}


def by_hand() -> Factors:
    """W1 = [[3, 4], [6, 8]], W2 = [[1, -1], [0.5, -0.5]]."""
    values = {"x1": [1.0, 2.0], "y1": [3.0, 4.0], "x2": [1.0, 0.5], "y2": [1.0, -1.0]}
    return {name: torch.tensor(value, dtype=torch.float64).view(2, 1) for name, value in values.items()}


def test_two_by_two_by_hand() -> None:
    shape = WeightShape(2, 2)
    assert Hadamard(rank=1).inner(by_hand(), shape, 1).tolist() == [[3, 4], [6, 8]]
    assert Hadamard(rank=1).inner(by_hand(), shape, 2).tolist() == [[1, -1], [0.5, -0.5]]
    assert Hadamard(rank=1).compose(by_hand(), shape).tolist() == [[3, -4], [3, -4]]
    assert Hadamard(rank=1, personal=True).compose(by_hand(), shape).tolist() == [[6, 0], [9, 4]]
    tanh = Hadamard(rank=1, tanh=True).compose(by_hand(), shape)
    expected = [
        [math.tanh(3) * math.tanh(1), -math.tanh(4) * math.tanh(1)],
        [math.tanh(6) * math.tanh(0.5), -math.tanh(8) * math.tanh(0.5)],
    ]
    assert tanh.tolist() == [pytest.approx(row) for row in expected]


@pytest.mark.parametrize("sides", [(7, 5), (5, 7), (6, 6)])
@pytest.mark.parametrize("kernel", [(3, 3), (3, 2), (4,), (1, 1)])
def test_convolution_is_proposition_3(sides: tuple[int, int], kernel: tuple[int, ...]) -> None:
    shape, scheme = WeightShape(*sides, kernel), Hadamard(rank=4)
    f = draw(scheme, shape)
    one, two = (torch.einsum("akb,oa,ib->oik", f[f"t{j}"], f[f"x{j}"], f[f"y{j}"]) for j in (1, 2))
    torch.testing.assert_close(scheme.compose(f, shape), (one * two).reshape(shape.size))
    torch.testing.assert_close(scheme.inner(f, shape, 2), two.reshape(shape.size))


def test_reshape_is_proposition_1_on_the_unrolled_kernel() -> None:
    shape, scheme = WeightShape(5, 3, (2, 2)), Hadamard(rank=2, reshape=True)
    f = draw(scheme, shape)
    assert {name: tuple(t.shape) for name, t in f.items()} == {
        "x1": (5, 2),
        "y1": (12, 2),
        "x2": (5, 2),
        "y2": (12, 2),
    }
    expected = (f["x1"] @ f["y1"].T) * (f["x2"] @ f["y2"].T)
    torch.testing.assert_close(scheme.compose(f, shape).flatten(1), expected)


@given(out=st.integers(1, 12), inp=st.integers(1, 12), rank=st.integers(1, 3), seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_rank_of_the_product_is_at_most_the_product_of_the_ranks(out: int, inp: int, rank: int, seed: int) -> None:
    rank = min(rank, out, inp)
    shape, scheme = WeightShape(out, inp), Hadamard(rank=rank)
    weight = scheme.compose(draw(scheme, shape, seed), shape)
    assert int(torch.linalg.matrix_rank(weight)) <= rank**2
    kernel = WeightShape(out, inp, (2, 2))
    weight = scheme.compose(draw(scheme, kernel, seed), kernel)
    assert int(torch.linalg.matrix_rank(weight.flatten(1))) <= rank**2
    assert int(torch.linalg.matrix_rank(weight.transpose(0, 1).flatten(1))) <= rank**2


def test_figure_6_every_draw_at_rank_10_is_of_full_rank() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(10):
        x1, y1, x2, y2 = torch.randn(4, 100, 100, 10, generator=g, dtype=torch.float64)
        assert torch.linalg.matrix_rank((x1 @ y1.mT) * (x2 @ y2.mT)).eq(100).all()


def test_ranks_of_vgg16_at_512_channels() -> None:
    shape = WeightShape(512, 512, (3, 3))
    ranks = [Hadamard(gamma=tenths / 10).rank_of(shape) for tenths in range(1, 10)]
    assert ranks == [52, 80, 109, 137, 166, 195, 223, 252, 280]
    assert Hadamard(gamma=0).rank_of(shape) == 23
    # From 12 to 77, 0.1 and 0.3 of the way are 18.5 and 31.5 (in floating point 31.4999): half to even.
    ties = [Hadamard(gamma=gamma).rank_of(WeightShape(128, 128, (3, 3))) for gamma in (0.1, 0.3)]
    assert ties == [18, 32]


@pytest.mark.parametrize(("classes", "ranks"), [(62, (56, 16)), (10, (56, 4))])
def test_ranks_of_pfedpara(classes: int, ranks: tuple[int, int]) -> None:
    scheme = Hadamard(gamma=0.5, personal=True)
    assert (scheme.rank_of(WeightShape(256, 784)), scheme.rank_of(WeightShape(classes, 256))) == ranks


def test_sizes_of_table_1() -> None:
    matrix, kernel = WeightShape(256, 256), WeightShape(256, 256, (3, 3))
    assert Hadamard(rank=16).parameters(matrix) == 2 * 16 * 512
    assert Hadamard(rank=16).parameters(kernel) == 2 * 16 * (512 + 16 * 9)
    assert Hadamard(rank=16, reshape=True).parameters(kernel) == 2 * 16 * (256 + 256 * 9)


@given(
    out=st.integers(1, 300),
    inp=st.integers(1, 300),
    kernel=st.sampled_from(KERNELS),
    gamma=st.floats(0, 1),
    reshape=st.booleans(),
)
@settings(deadline=None)
def test_never_more_parameters_than_the_dense_weight(
    out: int, inp: int, kernel: tuple[int, ...], gamma: float, reshape: bool
) -> None:
    shape = WeightShape(out, inp, kernel)
    try:
        size = Hadamard(gamma=1.0, reshape=reshape).parameters(shape)
    except Unfit:
        narrow = min(out, shape.fan_in if reshape else inp)
        full = Hadamard(rank=math.isqrt(narrow - 1) + 1, reshape=reshape).parameters(shape)
        assert full > shape.numel or narrow**2 < min(out, shape.fan_in)  # no small factors, or none of full rank
        reject()
    assert Hadamard(gamma=gamma, reshape=reshape).parameters(shape) <= size <= shape.numel


@given(out=st.integers(2, 200), inp=st.integers(2, 200), kernel=st.sampled_from(KERNELS), ratio=st.floats(0, 1))
@settings(deadline=None)
def test_ratio_gives_the_largest_rank_within(out: int, inp: int, kernel: tuple[int, ...], ratio: float) -> None:
    shape, budget = WeightShape(out, inp, kernel), ratio * out * inp * math.prod(kernel) + 1e-6
    try:
        rank = Hadamard(ratio=ratio).rank_of(shape)
    except Unfit:
        with pytest.raises(Unfit):
            Hadamard(gamma=0.5).rank_of(shape)
        reject()
    assert rank == 1 or Hadamard(rank=rank).parameters(shape) <= budget
    assert rank == min(out, inp) or Hadamard(rank=rank + 1).parameters(shape) > budget


def test_settings_out_of_range_name_the_range() -> None:
    shape = WeightShape(20, 30)
    with pytest.raises(ValueError, match=r"rank must lie in \[1, 20\], got 21"):
        Hadamard(rank=21).rank_of(shape)
    with pytest.raises(ValueError, match=r"rank must lie in \[1, 20\], got 0"):
        Hadamard(rank=0).shapes(shape)
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 1.5"):
        Hadamard(gamma=1.5).shapes(shape)
    with pytest.raises(ValueError, match=r"ratio must lie in \[0, 1\], got 2"):
        Hadamard(ratio=2.0).shapes(shape)
    with pytest.raises(ValueError, match="not both"):
        Hadamard(rank=1, ratio=0.5)
    with pytest.raises(ValueError, match="not both"):
        Hadamard(tanh=True, personal=True)


def test_small_weights_stay_dense() -> None:
    with pytest.raises(Unfit, match="inner rank 4, but beyond rank 2"):
        Hadamard(gamma=0.5).shapes(WeightShape(10, 10))
    with pytest.raises(Unfit, match="with 3 channels on one side no inner rank lets the kernel reach its full rank 27"):
        Hadamard(gamma=1.0).rank_of(WeightShape(64, 3, (3, 3)))
    with pytest.raises(Unfit, match="inner rank 4, but beyond rank 2"):
        Hadamard(ratio=0.5).shapes(WeightShape(10, 10))


# Factors of a given weight.

FITTED = [({}, ()), ({}, (3, 3)), ({"reshape": True}, (3, 3)), ({"tanh": True}, ()), ({"personal": True}, (3,))]


def error_of(scheme: Scheme, weight: Tensor, factors: Factors) -> float:
    return float((scheme.compose(factors, WeightShape.of(weight)) - weight).norm() / weight.norm())


@pytest.mark.parametrize(("options", "kernel"), FITTED, ids=str)
def test_factors_are_fitted_to_a_weight_better_than_low_rank_ones(options: Any, kernel: tuple[int, ...]) -> None:
    """The weight has the slowly falling spectrum of a trained one, and its entries are as large as those of one."""
    g, scheme = torch.Generator().manual_seed(0), Hadamard(gamma=0.5, **options)
    size = (48, 32, *kernel)
    flat = torch.randn(48, math.prod(size[1:]), generator=g)
    u, s, vh = torch.linalg.svd(flat, full_matrices=False)
    weight = ((u * s / torch.arange(1, 49)[: len(s)].sqrt()) @ vh).reshape(size)
    weight = weight * 0.2 / weight.std()
    shape = WeightShape.of(weight)
    one, two = (scheme.from_dense(weight, torch.Generator().manual_seed(1)) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) and not one[name].requires_grad for name in one)
    assert {name: tuple(factor.shape) for name, factor in one.items()} == scheme.shapes(shape)
    low = LowRank(rank=scheme.rank_of(shape))
    matrix = weight.flatten(1) if options.get("reshape") else weight
    assert error_of(scheme, weight, one) < 0.85 * error_of(low, matrix, low.from_dense(matrix))
    sizes = [float(factor.square().mean().sqrt()) for name, factor in one.items() if name.endswith("1")]
    assert max(sizes) == pytest.approx(min(sizes), rel=1e-4)  # as `init` draws them, so that SGD trains all alike


@pytest.mark.parametrize("scheme", [Hadamard(), Hadamard(personal=True), Hadamard(tanh=True), LowRank()], ids=str)
def test_a_weight_of_zeros_is_kept_and_can_be_trained(scheme: Scheme) -> None:
    shape = WeightShape(64, 64)
    factors = {name: factor.requires_grad_() for name, factor in scheme.from_dense(torch.zeros(64, 64)).items()}
    weight = scheme.compose(factors, shape)
    assert not weight.any()
    assert any(gradient.any() for gradient in torch.autograd.grad(weight.sum(), list(factors.values())))


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("gamma", [0.1, 0.5])
def test_starts_with_the_deviation_asked_for(gamma: float, options: dict[str, bool]) -> None:
    """One draw of a small layer strays by a tenth; what is derived is the mean square over draws."""
    scheme, g = Hadamard(gamma=gamma, **options), torch.Generator().manual_seed(0)
    for shape in [*VGG16, WeightShape(512, 512)]:
        draws = 1 if shape.numel > 10**6 else 2**20 // shape.numel
        weights = [scheme.compose(scheme.init(shape, g), shape) for _ in range(draws)]
        deviations = torch.stack([weight.square().mean() for weight in weights])
        assert float(deviations.mean().sqrt()) == pytest.approx(shape.he_std, rel=0.05), shape
        assert all(shape.he_std / 2 < float(v.sqrt()) < 2 * shape.he_std for v in deviations), shape


def test_start_takes_another_deviation_and_is_reproducible() -> None:
    shape, scheme = WeightShape(256, 256), Hadamard(tanh=True)
    one, two = (scheme.init(shape, torch.Generator().manual_seed(1), std=0.3) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert float(scheme.compose(one, shape).std()) == pytest.approx(0.3, rel=0.05)
    # No product of two tanh deviates by 5: the inner weights stop where tanh still has a slope.
    wide = scheme.init(shape, torch.Generator().manual_seed(1), std=5.0)
    assert float(scheme.inner(wide, shape, 1).std()) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", [WeightShape(4, 3), WeightShape(3, 4, (2,)), WeightShape(4, 3, (2, 1))], ids=str)
def test_first_and_second_derivatives(shape: WeightShape, options: dict[str, bool]) -> None:
    scheme = Hadamard(rank=2, **options)
    factors = draw(scheme, shape)
    values = tuple(factor.requires_grad_() for factor in factors.values())

    def compose(*values: Tensor) -> Tensor:
        return scheme.compose(dict(zip(factors, values, strict=True)), shape)

    assert torch.autograd.gradcheck(compose, values)
    assert torch.autograd.gradgradcheck(compose, values)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", [WeightShape(6, 5), WeightShape(4, 6, (3,)), WeightShape(6, 4, (2, 2))], ids=str)
def test_gradients_in_every_way_of_asking(shape: WeightShape, options: dict[str, bool]) -> None:
    """Once, again through a kept graph, through torch.func, with a part frozen: always those of the definition."""
    scheme = Hadamard(rank=3, **options)
    factors = {name: factor.requires_grad_() for name, factor in draw(scheme, shape).items()}
    gradient = torch.randn(shape.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one, two = (scheme.inner(factors, shape, which) for which in (1, 2))
    if scheme.tanh:
        one, two = one.tanh(), two.tanh()
    expected = one * (two + 1 if scheme.personal else two)
    wanted = torch.autograd.grad(expected, list(factors.values()), gradient)
    weight = scheme.compose(factors, shape)
    torch.testing.assert_close(weight, expected)
    for kept in (True, False):
        found = torch.autograd.grad(weight, list(factors.values()), gradient, retain_graph=kept)
        torch.testing.assert_close(found, wanted)
    detached = {name: factor.detach() for name, factor in factors.items()}
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            _, pull_back = torch.func.vjp(lambda values: scheme.compose(values, shape), detached)  # type: ignore[misc]
            for _ in range(2):
                torch.testing.assert_close(tuple(pull_back(gradient)[0].values()), wanted)
    frozen = {name: factor.detach() if name == "y1" else factor for name, factor in factors.items()}
    (found_x1,) = torch.autograd.grad(scheme.compose(frozen, shape), [factors["x1"]], gradient)
    torch.testing.assert_close(found_x1, wanted[0])


def test_lower_precision_under_autocast() -> None:
    shape, scheme = WeightShape(32, 32, (3, 3)), Hadamard(gamma=0.5)
    factors = {name: factor.requires_grad_() for name, factor in scheme.init(shape).items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weight = scheme.compose(factors, shape)
    assert weight.dtype is torch.bfloat16
    weight.float().square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(factor.grad is not None and factor.grad.dtype is torch.float32 for factor in factors.values())


@pytest.mark.parametrize("pixels", [(2, 2), (5, 4), (9, 9)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("sides", [(32, 16), (16, 32)])
def test_forward_is_the_convolution(pixels: tuple[int, int], stride: int, sides: tuple[int, int]) -> None:
    """Small images go the way of one product, large ones the way of torch's convolution."""
    shape, scheme = WeightShape(*sides, (3, 2)), Hadamard(rank=3)
    geometry = ConvGeometry((stride, 1), (1, 2), (1, 2))
    factors = {name: factor.requires_grad_() for name, factor in draw(scheme, shape).items()}
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, shape.inp, *pixels, generator=g, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(shape.out, generator=g, dtype=torch.float64, requires_grad=True)
    inputs = [x, bias, *factors.values()]
    ours = scheme.forward(x, factors, shape, geometry, bias)
    theirs = convolve(x, scheme.compose(factors, shape), bias, geometry)
    torch.testing.assert_close(ours, theirs)
    for one, two in zip(
        torch.autograd.grad(ours.square().sum(), inputs),
        torch.autograd.grad(theirs.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("sides", [(32, 16), (16, 32)])
@pytest.mark.parametrize("kernel", [(), (3,), (3, 3)])
@pytest.mark.parametrize("reshape", [False, True])
def test_macs_are_the_products_and_one_an_entry(
    device: str, sides: tuple[int, int], kernel: tuple[int, ...], reshape: bool
) -> None:
    shape, scheme = WeightShape(*sides, kernel), Hadamard(rank=5, reshape=reshape)
    factors = {name: torch.empty(size, device=device) for name, size in scheme.shapes(shape).items()}
    axes = len(kernel)
    geometry = ConvGeometry((1,) * axes, (1,) * axes, (1,) * axes) if kernel else None
    x = torch.empty(3, shape.inp, *[2] * axes, device=device)
    with FlopCounterMode(display=False) as counter:
        assert scheme.forward(x, factors, shape, geometry).shape == (3, shape.out, *[2] * axes)
    assert counter.get_total_flops() // 2 == scheme.macs(shape, 3 * 2**axes)


def test_jacobian_correction_by_hand() -> None:
    """J_W = [[1, 0], [0, 0]], eta = 0.1: only the first rows of X and Y move.

    J_W1 = J_W * W2 has one entry, 1 * 1; so J_X1 = (3, 0), J_Y1 = (1, 0). J_W2 has one, 1 * 3; so
    J_X2 = (3, 0), J_Y2 = (3, 0). Stepped: X1 = (0.7, 2), Y1 = (2.9, 4), X2 = (0.7, 0.5), Y2 = (0.7, -1), so
    W1' = [[2.03, 2.8], [5.8, 8]], W2' = [[0.49, -0.7], [0.35, -0.5]], W' = [[0.9947, -1.96], [2.03, -4]],
    while W - eta J_W = [[2.9, -4], [3, -4]].
    """
    shape, gradient = WeightShape(2, 2), torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    expected = math.sqrt((0.9947 - 2.9) ** 2 + (4 - 1.96) ** 2 + (2.03 - 3) ** 2)
    for strength in (1.0, 10.0):
        value = jacobian_correction(Hadamard(rank=1), by_hand(), shape, gradient, 0.1, strength)
        assert float(value) == pytest.approx(strength / 2 * expected, rel=1e-12)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", [WeightShape(4, 3), WeightShape(3, 3, (2, 2))], ids=str)
def test_jacobian_correction_and_its_gradient(shape: WeightShape, options: dict[str, bool]) -> None:
    """The step is SGD's on a loss with that gradient; derivatives agree with finite differences."""
    scheme = Hadamard(rank=2, **options)
    factors = {name: factor.requires_grad_() for name, factor in draw(scheme, shape).items()}
    target = torch.randn(shape.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(weight: Tensor) -> Tensor:
        return (weight - target).square().sum()

    weight = scheme.compose(factors, shape)
    (gradient,) = torch.autograd.grad(loss(weight), weight, create_graph=True)
    steps = torch.autograd.grad(loss(scheme.compose(factors, shape)), list(factors.values()))
    stepped = {n: f.detach() - 0.05 * s for (n, f), s in zip(factors.items(), steps, strict=True)}
    gap = scheme.compose(stepped, shape) - (weight - 0.05 * gradient)
    value = jacobian_correction(scheme, factors, shape, gradient, 0.05, 3.0)
    torch.testing.assert_close(value, 1.5 * gap.norm())

    def fixed(*values: Tensor) -> Tensor:
        return jacobian_correction(scheme, dict(zip(factors, values, strict=True)), shape, gradient, 0.05)

    def whole(*values: Tensor) -> Tensor:
        named = dict(zip(factors, values, strict=True))
        weight = scheme.compose(named, shape)
        (gradient,) = torch.autograd.grad(loss(weight), weight, create_graph=True)
        return jacobian_correction(scheme, named, shape, gradient, 0.05, differentiate_gradient=True)

    assert torch.autograd.gradcheck(fixed, tuple(factors.values()))
    assert torch.autograd.gradcheck(whole, tuple(factors.values()))


def test_tanh_enters_the_chain_rule_as_stated() -> None:
    """J_W1 = J_W * tanh(W2) * (1 - tanh(W1)^2), and J_X1 = J_W1 Y1, J_Y1 = J_W1^T X1."""
    shape, scheme, lr = WeightShape(4, 3), Hadamard(rank=2, tanh=True), 0.1
    f = draw(scheme, shape)
    gradient = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    inner = {j: f[f"x{j}"] @ f[f"y{j}"].T for j in (1, 2)}
    stepped = {}
    for j in (1, 2):
        outer = gradient * inner[3 - j].tanh() * (1 - inner[j].tanh() ** 2)
        stepped[j] = (f[f"x{j}"] - lr * outer @ f[f"y{j}"]) @ (f[f"y{j}"] - lr * outer.T @ f[f"x{j}"]).T
    gap = stepped[1].tanh() * stepped[2].tanh() - (inner[1].tanh() * inner[2].tanh() - lr * gradient)
    torch.testing.assert_close(jacobian_correction(scheme, f, shape, gradient, lr), 0.5 * gap.norm())


def test_jacobian_correction_of_zero_has_a_finite_gradient() -> None:
    shape, scheme = WeightShape(3, 3, (2, 2)), Hadamard(rank=2)
    factors = {name: factor.requires_grad_() for name, factor in draw(scheme, shape).items()}
    value = jacobian_correction(scheme, factors, shape, torch.zeros(shape.size, dtype=torch.float64), 0.1)
    assert value.item() == 0
    assert all(gradient.eq(0).all() for gradient in torch.autograd.grad(value, list(factors.values())))
