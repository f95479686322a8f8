"""The abstract scheme: one way to write a dense weight as a few small factors.

A scheme is a frozen dataclass of hyper-parameters. Its methods are pure functions of the shape of a weight and of plain
dictionaries of tensors, so they need no modules, no training and no federation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedfactor.profile import span

Factors = dict[str, Tensor]


class Unfit(ValueError):
    """Raised for a weight that a scheme cannot, or should not, factorise; the message is the reason."""


@dataclass(frozen=True)
class WeightShape:
    """Shape of a dense weight: `(out, inp)` for a matrix, `(out, inp, *kernel)` for a convolution."""

    out: int
    inp: int
    kernel: tuple[int, ...] = ()

    @classmethod
    def of(cls, weight: Tensor) -> WeightShape:
        """Return the shape of a weight of two or more axes."""
        out, inp, *kernel = weight.shape
        return cls(out, inp, tuple(kernel))

    @property
    def size(self) -> tuple[int, ...]:
        """The size of the weight as torch stores it."""
        return (self.out, self.inp, *self.kernel)

    @property
    def area(self) -> int:
        """Number of positions of the kernel: k*k for a k x k convolution, 1 for a matrix."""
        return math.prod(self.kernel)

    @property
    def fan_in(self) -> int:
        """Number of inputs that one output sums over."""
        return self.inp * self.area

    @property
    def numel(self) -> int:
        """Number of parameters of the dense weight."""
        return self.out * self.fan_in

    @property
    def he_std(self) -> float:
        """Standard deviation of He initialisation, which the initialisation of all schemes refers to."""
        return math.sqrt(2.0 / self.fan_in)

    def __str__(self) -> str:
        return " x ".join(map(str, self.size))


@dataclass(frozen=True)
class ConvGeometry:
    """How a convolution moves over its input; one number per axis of the kernel."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def plain(cls, axes: int) -> ConvGeometry:
        """Return stride 1, no padding and no dilation, as for a 1 x 1 convolution."""
        return cls((1,) * axes, (0,) * axes, (1,) * axes)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvGeometry, groups: int = 1) -> Tensor:
    """Convolve along as many axes as the geometry has (one or two)."""
    convolution = F.conv1d if len(geometry.stride) == 1 else F.conv2d
    return convolution(x, weight, bias, geometry.stride, geometry.padding, geometry.dilation, groups)


def normal(size: tuple[int, ...], std: float, generator: torch.Generator | None) -> Tensor:
    """Return a Gaussian tensor; all random numbers of this package come from here."""
    device = generator.device if generator is not None else None
    return torch.randn(size, generator=generator, device=device) * std


def spread(size: tuple[int, ...], generator: torch.Generator | None, fan_in: int) -> Tensor:
    """Return a Gaussian tensor of LoRA's start, with standard deviation 1 / sqrt(3 fan_in).

    LoRA and PEFT draw it uniformly from [-1 / sqrt(fan_in), 1 / sqrt(fan_in)], which has the same standard deviation.
    """
    return normal(size, 1 / math.sqrt(3 * fan_in), generator)


class Scheme(ABC):
    """One way to write a weight as factors.

    Sub-classes are frozen dataclasses whose fields are the hyper-parameters of the scheme.
    """

    name: ClassVar[str]
    sequential: ClassVar[bool] = False
    """Whether `forward` applies the factors one after another, without composing the weight."""
    frozen: ClassVar[tuple[str, ...]] = ()
    """Names of factors that are never trained."""

    @abstractmethod
    def shapes(self, shape: WeightShape) -> dict[str, tuple[int, ...]]:
        """Return the size of each factor of a weight of this shape. Raise `Unfit` if the scheme should not be used."""

    @abstractmethod
    def init(
        self, shape: WeightShape, generator: torch.Generator | None = None, *, std: float | None = None
    ) -> Factors:
        """Return random factors whose composed weight has standard deviation `std` (by default He's)."""

    @abstractmethod
    def compose(self, factors: Factors, shape: WeightShape) -> Tensor:
        """Return the dense weight, of size `shape.size`, that the factors stand for; differentiable."""

    def from_dense(self, weight: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return factors whose composed weight is `weight`, or closest to it.

        Schemes whose factors are not determined by the weight draw the rest from `generator`.
        """
        raise Unfit(f"{self.name} has no closed form for the factors of a given weight")

    # The change of a frozen base: W = W0 + (alpha / r) * compose(factors).

    def as_change(self) -> Scheme:
        """Return the scheme for the change of a frozen weight, if it differs from that for a whole weight."""
        return self

    def zero(self, base: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return factors that compose to zero, the start of the change of `base`, and still get gradients."""
        return self.from_dense(torch.zeros_like(base), generator)

    def alpha_rank(self, shape: WeightShape) -> int | None:
        """Return r, by which alpha is divided; `None` if the change is not scaled."""
        return None

    def added_to(self, base: Tensor, scale: float, factors: Factors, shape: WeightShape) -> Tensor:
        """Return W0 + scale * compose(factors); differentiable with respect to the factors."""
        return torch.add(base, self.compose(factors, shape), alpha=scale)

    def as_product(self, factors: Factors, shape: WeightShape) -> tuple[Tensor, Tensor]:
        """Return LoRA's B (out, r) and A (r, inp, *kernel), whose product is the weight. Raise `Unfit` without them."""
        raise Unfit(f"a weight of the scheme {self.name} is not the product B A of two factors")

    def forward(
        self,
        x: Tensor,
        factors: Factors,
        shape: WeightShape,
        geometry: ConvGeometry | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer to `x`: compose the weight and apply it, unless the scheme has a cheaper way.

        `geometry` is `None` for a linear layer.
        """
        with span("composing"):
            weight = self.compose(factors, shape)
        return F.linear(x, weight, bias) if geometry is None else convolve(x, weight, bias, geometry)

    def parameters(self, shape: WeightShape) -> int:
        """Count the parameters of the factors."""
        return sum(math.prod(size) for size in self.shapes(shape).values())

    @abstractmethod
    def compose_macs(self, shape: WeightShape) -> int:
        """Count the multiply-accumulates of `compose`: those of matrix products, without element-wise operations."""

    def macs(self, shape: WeightShape, positions: int) -> int:
        """Count the multiply-accumulates of `forward` at `positions` output positions (batch times pixels), stride 1.

        They include composing the weight, where `forward` composes it.
        """
        return self.compose_macs(shape) + shape.numel * positions


def check_range(what: str, value: float, low: float, high: float, *, whole: bool = False) -> None:
    """Raise ValueError if not `low <= value <= high`, or if `whole` and the value is not a whole number."""
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ValueError(f"{what} must be a {'whole ' if whole else ''}number in [{low:g}, {high:g}], got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{what} must lie in [{low:g}, {high:g}], got {value:g}")
