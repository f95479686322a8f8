"""The common form of all schemes: one dense weight, written as a few small factors.

A *scheme* is a frozen dataclass of hyper-parameters. Everything it does is a pure function of a weight's shape
and of plain dictionaries of tensors, so it can be used without modules, without training and without a federation.
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
    """A weight that a scheme cannot, or should not, factorise; the message is the reason."""


@dataclass(frozen=True)
class WeightShape:
    """Shape of a dense weight: `(out, inp)` for a matrix, `(out, inp, *kernel)` for a convolution."""

    out: int
    inp: int
    kernel: tuple[int, ...] = ()

    @classmethod
    def of(cls, weight: Tensor) -> WeightShape:
        """Read the shape off a weight of two or more axes."""
        out, inp, *kernel = weight.shape
        return cls(out, inp, tuple(kernel))

    @property
    def size(self) -> tuple[int, ...]:
        """The weight's own size, as torch stores it."""
        return (self.out, self.inp, *self.kernel)

    @property
    def area(self) -> int:
        """Positions of the kernel: k*k for a k x k convolution, 1 for a matrix."""
        return math.prod(self.kernel)

    @property
    def fan_in(self) -> int:
        """Inputs that one output sums over."""
        return self.inp * self.area

    @property
    def numel(self) -> int:
        """Parameters of the dense weight."""
        return self.out * self.fan_in

    @property
    def he_std(self) -> float:
        """Standard deviation of He initialisation, the reference for every scheme's own."""
        return math.sqrt(2.0 / self.fan_in)

    def __str__(self) -> str:
        return " x ".join(map(str, self.size))


@dataclass(frozen=True)
class ConvGeometry:
    """How a convolution moves over its input; one number an axis of the kernel."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def plain(cls, axes: int) -> ConvGeometry:
        """Stride 1, no padding, no dilation: what a 1 x 1 convolution needs."""
        return cls((1,) * axes, (0,) * axes, (1,) * axes)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvGeometry, groups: int = 1) -> Tensor:
    """Convolve along as many axes as the geometry has (one or two)."""
    convolution = F.conv1d if len(geometry.stride) == 1 else F.conv2d
    return convolution(x, weight, bias, geometry.stride, geometry.padding, geometry.dilation, groups)


def normal(size: tuple[int, ...], std: float, generator: torch.Generator | None) -> Tensor:
    """Draw a Gaussian tensor; every random number of this package comes from here."""
    device = generator.device if generator is not None else None
    return torch.randn(size, generator=generator, device=device) * std


class Scheme(ABC):
    """One way to write a weight as factors.

    Sub-classes are frozen dataclasses; their fields are the scheme's hyper-parameters.
    """

    name: ClassVar[str]

    @abstractmethod
    def shapes(self, shape: WeightShape) -> dict[str, tuple[int, ...]]:
        """Return the size of every factor of a weight of this shape, or raise `Unfit` with the reason."""

    @abstractmethod
    def init(
        self, shape: WeightShape, generator: torch.Generator | None = None, *, std: float | None = None
    ) -> Factors:
        """Draw factors whose composed weight has standard deviation `std` (He's by default)."""

    @abstractmethod
    def compose(self, factors: Factors, shape: WeightShape) -> Tensor:
        """Multiply the factors out to the dense weight of size `shape.size`; differentiable."""

    def from_dense(self, weight: Tensor, generator: torch.Generator | None = None) -> Factors:
        """Return factors whose composed weight is (closest to) `weight`.

        The generator serves schemes that the weight does not determine fully.
        """
        raise Unfit(f"{self.name} has no closed form for the factors of a given weight")

    def forward(
        self,
        x: Tensor,
        factors: Factors,
        shape: WeightShape,
        geometry: ConvGeometry | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer to `x`: composed and then applied as one weight, unless the scheme knows a cheaper way.

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
        """Count the multiply-accumulates of `compose`: matrix products; what is done entry by entry is not counted."""

    def macs(self, shape: WeightShape, positions: int) -> int:
        """Count the multiply-accumulates of `forward` at `positions` output positions (batch times pixels), stride 1.

        Composing the weight is part of it where the scheme composes.
        """
        return self.compose_macs(shape) + shape.numel * positions


def check_range(what: str, value: float, low: float, high: float, *, whole: bool = False) -> None:
    """Raise a sentence that names the legal range unless `low <= value <= high` (and `value` is a whole number)."""
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ValueError(f"{what} must be a {'whole ' if whole else ''}number in [{low:g}, {high:g}], got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{what} must lie in [{low:g}, {high:g}], got {value:g}")
