"""Networks of reduced width: the number of channels of a layer at a width."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Rounding = Literal["up", "nearest"]


def scaled(channels: int, width: float | Width, rounding: Rounding = "up") -> int:
    """Return ceil(width * channels) for a width in (0, 1]: the channels of a narrower layer (HeteroFL, PriSM).

    FedHM's narrow networks round to the nearest number instead, which reproduces its 1.37 M parameters at .35 and
    3.42 M at .4. Networks of reduced width and slices of full ones must round alike, so only this function rounds.
    """
    check_width(float(width))
    if isinstance(width, Width):
        return min(channels, width.times * scaled(channels, width.share, rounding))
    if rounding not in get_args(Rounding):
        raise ValueError(f"rounding must be 'up' or 'nearest', got {rounding!r}")
    if rounding == "nearest":
        return max(round(width * channels), 1)
    # 0.07 * 100 is 7.000000000000001 in floating point; that must not add a channel.
    return math.ceil(width * channels - 1e-9)


@dataclass(frozen=True)
class Width:
    """A width of `times` the channels that a network of width `share` has (PriSM-O2).

    It multiplies like the number `times * share`, for models that do not count channels by `scaled`.
    """

    share: float
    times: int = 1

    def __float__(self) -> float:
        return min(1.0, self.times * self.share)

    def __mul__(self, other: float) -> float:
        return float(self) * other

    __rmul__ = __mul__


def check_width(width: float) -> None:
    """Raise ValueError if `width` is not in (0, 1]."""
    if not 0.0 < width <= 1.0:
        raise ValueError(f"width must lie in (0, 1], got {width:g}")
