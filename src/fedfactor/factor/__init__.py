"""The mathematics of one weight: writing it as factors, and composing it from them."""

from fedfactor.factor.additive import Additive
from fedfactor.factor.base import Factors, Scheme, Unfit, WeightShape
from fedfactor.factor.composition import Composition, orthogonality
from fedfactor.factor.core import Core
from fedfactor.factor.dense import Dense, WeightNorm
from fedfactor.factor.hadamard import Hadamard, jacobian_correction
from fedfactor.factor.spectral import ChannelSplit, SpatialSplit, effective_rank, frobenius_decay, spectrum
from fedfactor.factor.tucker import LowRank

__all__ = [
    "Additive",
    "ChannelSplit",
    "Composition",
    "Core",
    "Dense",
    "Factors",
    "Hadamard",
    "LowRank",
    "Scheme",
    "SpatialSplit",
    "Unfit",
    "WeightNorm",
    "WeightShape",
    "effective_rank",
    "frobenius_decay",
    "jacobian_correction",
    "orthogonality",
    "spectrum",
]
