"""FedPara's Hadamard product of two low-rank weights, its personal variant, and the Jacobian correction."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedfactor.factor.base import ConvGeometry, Factors, Scheme, Unfit, WeightShape, check_range, normal, spread
from fedfactor.factor.tucker import LowRank

TANH_REACH = 2.0
"""Largest standard deviation before a tanh: beyond it, most entries are where tanh is almost constant."""
TANH_INSIDE = 0.95
"""Entries beyond this share of what a tanh reaches start from it: their inverse would be huge."""
FIT_STEPS = 200
"""Steps of L-BFGS that fit factors to a given weight. 200 more lowered the relative error by 0.003 to 0.02."""
FIT_DECAY = 0.01
"""Penalty on the factors' size during a fit. It costs no accuracy of the fit, and lets SGD continue with learning rates
as for random factors: without it, large terms cancel each other, and steps become up to 60 times longer."""
FIT_NOISE = 0.1
"""Standard deviation of the factors of W2 around W2 = 1 before a fit. 0.03 and 0.3 ended with larger errors."""

NARROW = 8
"""Rank from which the layout of a factor does not matter for the time of its products."""


@dataclass(frozen=True)
class Hadamard(Scheme):
    """W = W1 * W2 element by element, both of low rank r: the product has rank up to r^2 (Propositions 1 to 3).

    Factors of an (O, I) matrix (Proposition 1): x1, x2 (O, r) and y1, y2 (I, r), with Wj = Xj Yj^T.
    Convolutions (Proposition 3), including 1 x 1 kernels, also have cores t1, t2 (r, k*k, r):
    Wj[o, i, k] = sum_ab Xj[o, a] Tj[a, k, b] Yj[i, b]. The positions of the kernel are the middle axis of a core,
    so that composing consists of matrix products on views and results in a kernel whose channels are contiguous.
    """

    gamma: float = 0.1
    """r = (1 - gamma) r_min + gamma r_max (Sec. 3.1), in [0, 1]; unused if `rank` or `ratio` is given."""
    rank: int | None = None
    """The inner rank itself, in [1, min(O, I)]."""
    ratio: float | None = None
    """Share of the parameters of the dense weight, in [0, 1]: gives the largest rank within it, at least 1."""
    tanh: bool = False
    """W = tanh(W1) * tanh(W2) (appendix B)."""
    personal: bool = False
    """W = W1 * (W2 + 1), W2 being the part that stays on the client (pFedPara, Sec. 2.3)."""
    reshape: bool = False
    """Proposition 1 on the (O, I k k) matrix of a convolution: no cores, y1 and y2 of size (I k k, r)."""
    name: ClassVar[str] = "hadamard"

    def __post_init__(self) -> None:
        if self.rank is not None and self.ratio is not None:
            raise ValueError("set rank or ratio, not both")
        if self.tanh and self.personal:
            raise ValueError("personal=True is W1 * (W2 + 1) without a tanh: set tanh or personal, not both")

    def rank_of(self, shape: WeightShape) -> int:
        """Return the inner rank r for a weight of this shape. Raise `Unfit` if the weight should stay dense.

        r_min = min(ceil sqrt O, ceil sqrt I) is the smallest rank whose square reaches min(O, I) (Corollary 1), which
        is full rank for a matrix. r_max is the largest rank with no more parameters than the dense weight:
        2 r_max (O + I + r_max k^2) is at most O I k^2. Between the two, r is rounded half to even: 13 of the 18 sizes
        of Table 5 match; rounding half up would match 12, always up 8.

        Weights with r_max < r_min stay dense. So do kernels with so few channels on one side (the three of an image)
        that no rank reaches min(O, I k^2): their filters would be multiples of each other. `rank` overrides this rule.
        """
        rows, columns = self._sides(shape)
        most = min(rows, columns)
        if self.rank is not None:
            check_range("rank", self.rank, 1, most, whole=True)
            return self.rank
        full = min(shape.out, shape.fan_in)
        if most * most < full:
            raise Unfit(f"with {most} channels on one side no inner rank lets the kernel reach its full rank {full}")
        # ceil(sqrt n) in integer arithmetic.
        smallest, largest = math.isqrt(most - 1) + 1, self._rank_within(shape, shape.numel)
        if largest < smallest:
            raise Unfit(
                f"full rank takes inner rank {smallest}, but beyond rank {largest} "
                "the factors have more parameters than the weight"
            )
        if self.ratio is not None:
            check_range("ratio", self.ratio, 0, 1)
            # Rounding errors of the product must not cost a parameter.
            return min(max(1, self._rank_within(shape, math.floor(round(self.ratio * shape.numel, 6)))), most)
        check_range("gamma", self.gamma, 0, 1)
        # Without the inner rounding, the last bits of gamma would decide ties.
        middle = round(round((1 - self.gamma) * smallest + self.gamma * largest, 9))
        return min(max(1, middle), most)

    def shapes(self, shape: WeightShape) -> dict[str, tuple[int, ...]]:
        """Return the sizes of x1, y1 and, for convolutions, t1; then of x2, y2, t2."""
        r = self.rank_of(shape)
        rows, columns = self._sides(shape)
        one = {"x": (rows, r), "y": (columns, r)}
        sizes: dict[str, tuple[int, ...]] = {**one, "t": (r, shape.area, r)} if self._has_core(shape) else {**one}
        return {f"{name}{which}": size for which in (1, 2) for name, size in sizes.items()}

    def init(
        self, shape: WeightShape, generator: torch.Generator | None = None, *, std: float | None = None
    ) -> Factors:
        """Return Gaussian factors for which the composed weight has standard deviation `std` (by default He's).

        An entry of Wj sums r products of two factors, or r^2 of three with a core. With equal variances v its
        own variance is r v^2 or r^2 v^3, so for std(Wj) = s the factors' deviation is (s / sqrt r)^(1/2) or
        (s / r)^(1/3).

        W1 * W2: the entries are independent with mean 0, so s1 s2 = std; split evenly, s1 = s2 = sqrt(std).
        With tanh each side has to be sqrt(std) after it. Tanh shrinks (by 6 % at 64 channels and He's std,
        hence W by 12 %), so s is the solution of E tanh(s z)^2 = std, z ~ N(0, 1), but at most `TANH_REACH`.
        W1 * (W2 + 1): var(W) = s1^2 (1 + s2^2). s2 = sqrt(std) as above gives X2 and Y2 the size they have in
        FedPara, and W starts as the global W1 with a personal residue W1 * W2 of a tenth to a third of it;
        s1 = std / sqrt(1 + s2^2) makes up the rest.
        """
        std = shape.he_std if std is None else std
        first = second = math.sqrt(std)
        if self.tanh:
            first = second = _before_tanh(first)
        elif self.personal:
            first = std / math.sqrt(1 + std)
        r, core = self.rank_of(shape), self._has_core(shape)
        factors = {}
        for name, size in self.shapes(shape).items():
            inner = first if name.endswith("1") else second
            factors[name] = normal(size, (inner / r) ** (1 / 3) if core else (inner / r**0.5) ** 0.5, generator)
        return factors

    def from_dense(self, weight: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return factors whose composed weight is close to `weight`: a low-rank fit, improved by L-BFGS.

        W1 starts as the best low-rank fit of the weight, and W2 (pFedPara: W2 + 1) as 1 plus noise, without which the
        gradient of most of its factors would be 0. The fit ends near a local optimum. For trained matrices its error is
        below that of a truncated SVD with as many parameters.
        """
        shape, target = WeightShape.of(weight), weight.detach().float()
        if not target.any():  # of factors that are all 0, none would ever get a gradient
            factors = self.init(shape, generator)
            return {**factors, "x1": torch.zeros_like(factors["x1"])}
        scale = 1.0 if self.tanh else float(target.square().mean().sqrt())  # a weight under a tanh keeps its size
        target = target / scale
        factors = self._start_of_fit(target, shape, generator)
        values = [nn.Parameter(factor.contiguous()) for factor in factors.values()]
        energy, size_before = target.square().sum(), sum(float(factor.square().sum()) for factor in factors.values())

        @torch.enable_grad()
        def error() -> Tensor:
            composed = self.compose(dict(zip(factors, values, strict=True)), shape)
            size_now = sum((value.square().sum() for value in values), torch.zeros(()))
            found: Tensor = (composed - target).square().sum() / energy + FIT_DECAY * size_now / size_before
            for value, gradient in zip(values, torch.autograd.grad(found, values), strict=True):
                value.grad = gradient.contiguous()
            return found.detach()

        fit = torch.optim.LBFGS(
            values, max_iter=FIT_STEPS, tolerance_grad=0.0, history_size=10, line_search_fn="strong_wolfe"
        )
        fit.step(error)  # type: ignore[no-untyped-call]
        factors = {name: value.detach() for name, value in zip(factors, values, strict=True)}
        factors["x1"] = factors["x1"] * scale
        for side in "12" if self.tanh or self.personal else ("12",):  # only W1 * W2 can move a factor from side to side
            _balance(factors, [name for name in factors if name[1] in side])
        return factors

    def zero(self, base: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return LoHa's start as PEFT has it: Y2 = 0 (pFedPara: Y1 = 0), and the other factors as LoRA's A."""
        sizes = self.shapes(WeightShape.of(base))
        fans = {name: math.prod(size[:-1]) if name[0] == "t" else size[name[0] == "x"] for name, size in sizes.items()}
        factors = {name: spread(size, generator, fans[name]) for name, size in sizes.items()}
        silent = "y1" if self.personal else "y2"
        return {**factors, silent: base.new_zeros(sizes[silent])}

    def alpha_rank(self, shape: WeightShape) -> int | None:
        """Return the inner rank."""
        return self.rank_of(shape)

    def _start_of_fit(self, target: Tensor, shape: WeightShape, generator: torch.Generator | None) -> Factors:
        core, r = self._has_core(shape), self.rank_of(shape)
        # tanh(1) is the second side at the start.
        wanted = (target / math.tanh(1)).clamp(-TANH_INSIDE, TANH_INSIDE).atanh() if self.tanh else target
        low = LowRank(rank=r).from_dense(wanted if core else wanted.flatten(1))
        first = {"x1": low["x"], "y1": low["y"].mT}
        if core:
            first["t1"] = low["t"].flatten(2).mT
        second = {
            name: normal(size, FIT_NOISE, generator) for name, size in self.shapes(shape).items() if name.endswith("2")
        }
        if not self.personal:  # the first components are W2 = 1
            for name, factor in second.items():
                factor[(0, slice(None), 0) if name == "t2" else (slice(None), 0)] = 1.0
        return {**first, **second}

    def compose(self, factors: Factors, shape: WeightShape) -> Tensor:
        """Multiply the factors out. Kernels have torch's channels-last layout, as views of the product."""
        return self._as_weight(self._product(factors, shape), shape)

    def added_to(self, base: Tensor, scale: float, factors: Factors, shape: WeightShape) -> Tensor:
        """Return W0 + scale * W1 * W2, in one pass over the weight if its layout is that of the product."""
        if self._has_core(shape) and shape.area != 1:
            return super().added_to(base, scale, factors, shape)
        return self._as_weight(self._product(factors, shape, base.view(shape.out, -1), scale), shape)

    def _product(self, factors: Factors, shape: WeightShape, base: Tensor | None = None, scale: float = 1.0) -> Tensor:
        operands = (*self._operands(factors, shape, 1), *self._operands(factors, shape, 2))
        shift = 1.0 if self.personal else 0.0
        on_cpu = operands[0].device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        if on_cpu and torch.is_grad_enabled():
            found: Tensor = _Product.apply(*operands, self.tanh, shift, base, scale)[0]  # type: ignore[no-untyped-call]
            return found
        first, second = _sides_of_product(*operands, self.tanh, shift)
        return first * second if base is None else torch.addcmul(base, first, second, value=scale)

    def inner(self, factors: Factors, shape: WeightShape, which: Literal[1, 2]) -> Tensor:
        """Return W1 or W2, of size `shape.size`: before any tanh, and without pFedPara's + 1."""
        left, right = self._operands(factors, shape, which)
        return self._as_weight(left @ right, shape)

    def forward(
        self,
        x: Tensor,
        factors: Factors,
        shape: WeightShape,
        geometry: ConvGeometry | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Compose the weight and apply it, as one matrix product if the weight dominates the cost of a convolution.

        On a CPU, torch reorders the gradient of a channels-last kernel twice, which on small images takes longer than
        the convolution itself. A product with the unfolded images uses the kernel as it was composed; it is used if
        the unfolded images are no larger than the weight.
        """
        if geometry is None or len(geometry.stride) != 2 or x.dim() != 4 or x.device.type != "cpu":
            return super().forward(x, factors, shape, geometry, bias)
        pixels = [
            (n + 2 * pad - dilation * (k - 1) - 1) // stride + 1
            for n, k, stride, pad, dilation in zip(
                x.shape[2:], shape.kernel, geometry.stride, geometry.padding, geometry.dilation, strict=True
            )
        ]
        positions = x.shape[0] * math.prod(pixels)
        if not self._has_core(shape) or not 0 < positions <= shape.out or min(pixels) < 1:
            return super().forward(x, factors, shape, geometry, bias)
        patches = nn.functional.unfold(x, shape.kernel, geometry.dilation, geometry.padding, geometry.stride)
        patches = patches.view(-1, shape.inp, shape.area, math.prod(pixels)).permute(0, 3, 2, 1)
        weight = self.compose(factors, shape).flatten(2).mT.reshape(shape.out, -1)
        out = nn.functional.linear(patches.reshape(positions, -1), weight, bias)
        return out.view(-1, *pixels, shape.out).permute(0, 3, 1, 2)

    def compose_macs(self, shape: WeightShape) -> int:
        """Count the products of both inner weights."""
        r = self.rank_of(shape)
        core = r * r * shape.area * min(shape.out, shape.inp) if self._has_core(shape) else 0
        return 2 * (core + r * shape.numel)

    def _has_core(self, shape: WeightShape) -> bool:
        return bool(shape.kernel) and not self.reshape

    def _sides(self, shape: WeightShape) -> tuple[int, int]:
        """Return rows and columns of an inner weight as a matrix, at one position of the kernel."""
        return shape.out, shape.inp if self._has_core(shape) else shape.fan_in

    def _rank_within(self, shape: WeightShape, parameters: int) -> int:
        """Return the largest R with 2R (rows + columns + R k^2) <= parameters, in integer arithmetic."""
        sides = sum(self._sides(shape))
        if not self._has_core(shape):
            return parameters // (2 * sides)
        area = shape.area
        return (math.isqrt(sides * sides + 2 * area * parameters) - sides) // (2 * area)

    def _operands(self, factors: Factors, shape: WeightShape, which: int) -> tuple[Tensor, Tensor]:
        """Return two matrices whose product is Wj, row by row; the core goes to the side where it costs less.

        (O, r) and (r, k k I), or (O k k, r) and (r, I); without a core (O, r) and (r, columns).
        """
        x, y = factors[f"x{which}"], factors[f"y{which}"]
        if not self._has_core(shape):
            return x, y.mT
        core = factors[f"t{which}"]
        r = core.shape[0]
        if shape.inp <= shape.out:
            return x, (core.reshape(-1, r) @ y.mT).view(r, -1)
        return (x @ core.flatten(1)).view(-1, r), y.mT

    def _as_weight(self, matrix: Tensor, shape: WeightShape) -> Tensor:
        if self._has_core(shape):
            return matrix.view(shape.out, shape.area, shape.inp).mT.view(shape.size)
        return matrix.view(shape.size)


def _sides_of_product(
    left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor, tanh: bool, shift: float
) -> tuple[Tensor, Tensor]:
    """Return the two matrices of the element-wise product: (tanh of) W1, and (tanh of) W2 + shift."""
    first, second = left1 @ right1, left2 @ right2
    if tanh:
        first, second = first.tanh(), second.tanh()
    return first, second.add_(shift) if shift else second


class _Product(torch.autograd.Function):
    """W1 * W2 of `_sides_of_product`, or W0 + scale * W1 * W2 if a base W0 is given, returned with both sides.

    Autograd's own backward pass computes the same. This one is faster on a CPU for two reasons: it reuses the memory of
    the inner weights, since allocating that much memory takes as long as the product; and it computes all products with
    the small matrix on the left, which is up to 30 % faster. If the gradient is to be differentiated, or is asked for
    twice, the inner weights are computed again.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        *operands, base, scale = inputs
        first, second = _sides_of_product(*operands)
        found = first * second if base is None else torch.addcmul(base, first, second, value=scale)
        return found, first, second

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *operands, ctx.tanh, ctx.shift, base, ctx.scale = inputs
        ctx.adds = base is not None
        ctx.save_for_backward(*operands)
        ctx.sides = output[1:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        left1, right1, left2, right2 = ctx.saved_tensors
        with_graph = torch.is_grad_enabled()
        sides, ctx.sides = ctx.sides, None
        if with_graph or sides is None:
            sides = _sides_of_product(left1, right1, left2, right2, ctx.tanh, ctx.shift)
        first, second = sides
        if ctx.tanh:
            grads = (grad * second * (1 - first * first), grad * first * (1 - second * second))
        elif with_graph:
            grads = (grad * second, grad * first)
        else:
            grads = (second.mul_(grad), first.mul_(grad))
        needs = ctx.needs_input_grad
        # Products with few rows that are not contiguous take up to 40 times as long. Without a base they are left as
        # they are: the last bits of all results would change.
        if ctx.adds and left1.shape[1] < NARROW:
            right1, right2 = right1.contiguous(), right2.contiguous()
        found = (
            (right1 @ grads[0].mT).mT if needs[0] else None,
            left1.mT @ grads[0] if needs[1] else None,
            (right2 @ grads[1].mT).mT if needs[2] else None,
            left2.mT @ grads[1] if needs[3] else None,
        )
        if ctx.scale != 1:  # now that they are small
            found = tuple(one if one is None else one * ctx.scale for one in found)  # type: ignore[assignment]
        return (*found, None, None, None, None)


def jacobian_correction(
    scheme: Scheme,
    factors: Factors,
    shape: WeightShape,
    weight_grad: Tensor,
    lr: float,
    strength: float = 1.0,
    differentiate_gradient: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """Return (lambda / 2) ||W' - (W - eta J_W)||, a scalar to add to the loss (Eq. 6 to 9).

    W' is composed of the factors after one SGD step of length eta = `lr` along their own gradients, which
    follow from J_W = `weight_grad` (of size `shape.size`) by the chain rule: J_W1 = J_W * W2, J_X1 = J_W1 Y1,
    J_Y1 = J_W1^T X1 (Eq. 6 prints J_W1 Y1^T and X1^T J_W1, which do not fit the shapes); with tanh,
    J_W1 = J_W * tanh(W2) * (1 - tanh(W1)^2). The norm is the Frobenius norm, not squared, as printed; its
    gradient at 0 is 0.

    J_W is a constant unless `differentiate_gradient` is set, which needs a J_W with a graph (`create_graph=True`).
    `scale` is that of the change of a frozen base (alpha / r), whose base cancels out.
    """
    if not differentiate_gradient:
        weight_grad = weight_grad.detach()

    def compose(values: Factors) -> Tensor:
        composed = scheme.compose(values, shape)
        return composed if scale == 1 else scale * composed

    weight, pull_back = torch.func.vjp(compose, factors)  # type: ignore[misc]
    (gradients,) = pull_back(weight_grad)
    stepped = {name: factor - lr * gradients[name] for name, factor in factors.items()}
    norm: Tensor = torch.linalg.vector_norm(compose(stepped) - (weight - lr * weight_grad))
    return 0.5 * strength * norm


def _balance(factors: Factors, names: Iterable[str]) -> None:
    """Rescale these factors to the same size, as `init` draws them, without changing their product."""
    sizes = {name: float(factors[name].square().mean().sqrt()) for name in names}
    common = math.exp(sum(map(math.log, sizes.values())) / len(sizes))
    for name, size in sizes.items():
        factors[name] = factors[name] * (common / size)


@cache
def _before_tanh(std: float) -> float:
    """Return s with E tanh(s z)^2 = std^2 for a standard normal z, or `TANH_REACH` if s would be larger."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(64)
    weights = weights / weights.sum()
    low, high = std, TANH_REACH
    for _ in range(50):
        middle = (low + high) / 2
        if float(weights @ np.tanh(middle * nodes) ** 2) < std**2:
            low = middle
        else:
            high = middle
    return high
