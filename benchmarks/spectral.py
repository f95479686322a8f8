"""Spectral splits of all factorised layers of a ResNet-18, against full decompositions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import emit, medians, note
from fedfactor.factor.base import WeightShape, normal
from fedfactor.factor.spectral import ChannelSplit, SpatialSplit, SpectralSplit

# (out, inp) of the 3 x 3 convolutions of the blocks, CIFAR's ResNet-18.
BLOCKS = [(64, 64)] * 4
for width in (128, 256, 512):
    BLOCKS += [(width, width // 2), *[(width, width)] * 3]


def gaussian_weights(sizes: list[tuple[int, int]]) -> list[Tensor]:
    """He's initialisation."""
    generator = torch.Generator().manual_seed(0)
    shapes = [WeightShape(out, inp, (3, 3)) for out, inp in sizes]
    return [normal(shape.size, shape.he_std, generator) for shape in shapes]


def decaying_weights(scheme: SpectralSplit, sizes: list[tuple[int, int]]) -> list[Tensor]:
    """Singular values of about 5 / sqrt(i) over a bulk of noise, as training leaves them."""
    generator = torch.Generator().manual_seed(1)
    weights = []
    for weight in gaussian_weights(sizes):
        noise = scheme._unroll(weight)
        rows, columns = noise.shape
        short = min(rows, columns)
        left = torch.linalg.qr(normal((rows, short), 1.0, generator)).Q
        right = torch.linalg.qr(normal((columns, short), 1.0, generator)).Q
        values = 5 / torch.arange(1, short + 1).sqrt()
        matrix = (left * values) @ right.T + 0.1 * noise / (noise.std() * math.sqrt(columns))
        weights.append(scheme._roll(matrix, WeightShape.of(weight)))
    return weights


def worst_error(scheme: SpectralSplit, weights: list[Tensor]) -> float:
    """The largest ratio of a split's error to the optimal error of its rank."""
    ratios = []
    for weight in weights:
        shape = WeightShape.of(weight)
        values = torch.linalg.svdvals(scheme._unroll(weight).double())
        optimum = torch.linalg.vector_norm(values[scheme.rank_of(shape) :])
        error = torch.linalg.vector_norm((weight - scheme.compose(scheme.from_dense(weight), shape)).double())
        ratios.append((error / optimum).item())
    return max(ratios)


def decompositions(scheme: SpectralSplit, weights: list[Tensor]) -> dict[str, Callable[[], object]]:
    unrolled = [scheme._unroll(weight).contiguous() for weight in weights]
    return {
        "full": lambda: [torch.linalg.svd(matrix, full_matrices=False) for matrix in unrolled],
        "split": lambda: [scheme.from_dense(weight) for weight in weights],
    }


def run() -> None:
    torch.set_num_threads(1)
    # FedHM leaves the first block (two convolutions) whole.
    cases: list[tuple[str, SpectralSplit, list[tuple[int, int]], str]] = [
        ("prism", ChannelSplit(0.5), BLOCKS, ">= 5"),
        ("fedhm", SpatialSplit(0.5), BLOCKS[2:], ">= 3.5"),
    ]
    for name, scheme, sizes, target in cases:
        note(f"spectral: {name}, {len(sizes)} layers")
        spectra = {"": gaussian_weights(sizes), "_decaying": decaying_weights(scheme, sizes)}
        for suffix, weights in spectra.items():
            seconds = medians(decompositions(scheme, weights), repeats=5 if not suffix else 3)
            goal = target if not suffix else "none, for comparison"
            emit(f"spectral_{name}{suffix}_speedup", seconds["full"] / seconds["split"], "times", goal)
            emit(f"spectral_{name}{suffix}_error", worst_error(scheme, weights), "of optimum", "<= 1.01")
