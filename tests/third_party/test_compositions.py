"""Composed weights, values and gradients, against LyCORIS and PEFT.

Both libraries know FedPara's product as LoHa. They name factors otherwise: W_j = `wju` `wjd` in LyCORIS and
`hada_wj_a` `hada_wj_b` in PEFT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfactor.factor import ChannelSplit, Hadamard, LowRank, Scheme, WeightShape
from fedfactor.factor.base import ConvGeometry, Factors

pytestmark = pytest.mark.third_party

RANK = 3
MATRIX, KERNEL = WeightShape(7, 5), WeightShape(7, 5, (3, 2))
GEOMETRY = ConvGeometry((2, 1), (1, 0), (1, 1))
HADAMARD = [
    pytest.param(Hadamard(rank=RANK), MATRIX, id="linear"),
    pytest.param(Hadamard(rank=RANK, reshape=True), KERNEL, id="convolution without cores"),
    pytest.param(Hadamard(rank=RANK), KERNEL, id="convolution with cores"),
]


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(scheme: Scheme, shape: WeightShape) -> Factors:
    return {
        name: random(*size, seed=seed).requires_grad_()
        for seed, (name, size) in enumerate(scheme.shapes(shape).items())
    }


def equal(ours: Tensor, theirs: Tensor, factors: Factors) -> None:
    """Check two results of the same factors, and the gradients of both in an arbitrary direction."""
    torch.testing.assert_close(ours, theirs)
    assert gradients(ours, factors).keys() == factors.keys()
    for name, gradient in gradients(theirs, factors).items():
        torch.testing.assert_close(gradients(ours, factors)[name], gradient, msg=lambda text, n=name: f"{n}: {text}")


def gradients(result: Tensor, factors: Factors) -> Factors:
    found = torch.autograd.grad(result, list(factors.values()), random(*result.shape, seed=99), retain_graph=True)
    return dict(zip(factors, found, strict=True))


def core(factors: Factors, side: int, shape: WeightShape) -> Tensor:
    """Return the core (r, k k, r) as both libraries have it: (r, r, *kernel)."""
    return factors[f"t{side}"].mT.reshape(RANK, RANK, *shape.kernel)


# LyCORIS


@pytest.mark.parametrize(("scheme", "shape"), HADAMARD)
def test_hadamard_is_the_loha_of_lycoris(scheme: Hadamard, shape: WeightShape) -> None:
    from lycoris.functional.loha import diff_weight

    f = draw(scheme, shape)
    cores = [core(f, side, shape) if "t1" in f else None for side in (1, 2)]
    sides = []
    for side in (1, 2):
        up, down = f[f"x{side}"], f[f"y{side}"].mT
        sides += [down if "t1" in f else down.view(RANK, shape.inp, *shape.kernel), up.mT if "t1" in f else up]
    equal(scheme.compose(f, shape), diff_weight(*sides, *cores, gamma=torch.tensor(1.0), backend="torch"), f)


@pytest.mark.parametrize("shape", [MATRIX, KERNEL], ids=["linear", "convolution"])
def test_low_rank_is_the_locon_of_lycoris(shape: WeightShape) -> None:
    from lycoris.functional.locon import diff_weight

    scheme = LowRank(rank=RANK)
    f = draw(scheme, shape)
    theirs = diff_weight(f["y"], f["x"], f.get("t"), backend="torch")
    equal(scheme.compose(f, shape), theirs, f)


# PEFT


def adapted(config: Any, shape: WeightShape, weights: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a layer with PEFT's adapter. The base weight is zero, so the output is the adapter's."""
    from peft import inject_adapter_in_model

    layer = (
        nn.Conv2d(shape.inp, shape.out, shape.kernel, GEOMETRY.stride, GEOMETRY.padding, bias=False)
        if shape.kernel
        else nn.Linear(shape.inp, shape.out, bias=False)
    )
    nn.init.zeros_(layer.weight)
    model = inject_adapter_in_model(config, nn.ModuleDict({"layer": layer}).double())
    adapter = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    values = {f"layer.{name}": value for name, value in weights.items()}
    assert adapter == values.keys()
    return lambda x: torch.func.functional_call(
        model["layer"], {n.removeprefix("layer."): values[n] for n in values}, x
    )


def inputs(shape: WeightShape) -> Tensor:
    return random(2, shape.inp, *[6 for _ in shape.kernel], seed=50)


def applied(scheme: Scheme, f: Factors, shape: WeightShape) -> Tensor:
    return scheme.forward(inputs(shape), f, shape, GEOMETRY if shape.kernel else None)


def loha(scheme: Hadamard, f: Factors, shape: WeightShape) -> Tensor:
    """Apply PEFT's LoHa with the factors of a scheme."""
    from peft import LoHaConfig

    config = LoHaConfig(r=RANK, alpha=RANK, target_modules=["layer"], use_effective_conv2d=not scheme.reshape)
    weights = {}
    for side in (1, 2):
        weights[f"hada_w{side}_a.default"] = f[f"x{side}"].mT if "t1" in f else f[f"x{side}"]
        weights[f"hada_w{side}_b.default"] = f[f"y{side}"].mT
        if "t1" in f:
            weights[f"hada_t{side}.default"] = core(f, side, shape)
    return adapted(config, shape, weights)(inputs(shape))


@pytest.mark.parametrize(("scheme", "shape"), HADAMARD[:2])
def test_hadamard_is_the_loha_of_peft(scheme: Hadamard, shape: WeightShape) -> None:
    f = draw(scheme, shape)
    equal(applied(scheme, f, shape), loha(scheme, f, shape), f)


def test_loha_of_peft_with_cores_has_the_gradients_of_x1_and_x2_wrong() -> None:
    """Values agree. In PEFT the gradient of x1 contracts the core and y of side 2, and that of x2 those of side 1."""
    scheme, shape = Hadamard(rank=RANK), KERNEL
    f = draw(scheme, shape)
    ours, theirs = applied(scheme, f, shape), loha(scheme, f, shape)
    torch.testing.assert_close(ours, theirs)
    right, wrong = gradients(ours, f), gradients(theirs, f)
    for name in ("y1", "t1", "y2", "t2"):
        torch.testing.assert_close(right[name], wrong[name])

    weight = scheme.compose(f, shape).detach().requires_grad_()
    (direction,) = torch.autograd.grad(
        nn.functional.conv2d(inputs(shape), weight, None, GEOMETRY.stride, GEOMETRY.padding),
        weight,
        random(*ours.shape, seed=99),
    )
    chains = [torch.einsum("akb,ib->aik", f[f"t{side}"], f[f"y{side}"]) for side in (1, 2)]
    for name, other, own_chain, other_chain in (("x1", 2, *chains), ("x2", 1, *reversed(chains))):
        inner = (direction * scheme.inner(f, shape, other)).flatten(2)
        torch.testing.assert_close(right[name], torch.einsum("oik,aik->oa", inner, own_chain))
        torch.testing.assert_close(wrong[name], torch.einsum("oik,aik->oa", inner, other_chain))


@pytest.mark.parametrize(
    ("scheme", "shape", "names"),
    [
        pytest.param(LowRank(rank=RANK), MATRIX, ("y", "x"), id="linear"),
        # PEFT's LoRA of a convolution is a k x k convolution to r channels and a 1 x 1 convolution: no Tucker core.
        pytest.param(ChannelSplit(rank=RANK), KERNEL, ("v", "u"), id="convolution"),
    ],
)
def test_low_rank_is_the_lora_of_peft(scheme: Scheme, shape: WeightShape, names: tuple[str, str]) -> None:
    from peft import LoraConfig

    f = draw(scheme, shape)
    weights = {f"lora_{letter}.default.weight": f[name] for letter, name in zip("AB", names, strict=True)}
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["layer"])
    equal(applied(scheme, f, shape), adapted(config, shape, weights)(inputs(shape)), f)
