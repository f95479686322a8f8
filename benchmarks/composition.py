"""A FLANC layer against the dense convolution of the same width, forward and backward, at batch 32."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.harness import emit, medians, note
from fedfactor.factor import Composition
from fedfactor.nn import factorize

# (stage, full width, pixels, R1 of both blocks, R2) of ResNet-18 as the authors set it
STAGES = [
    ("layer1", 64, 32, 8, 16),
    ("layer2", 128, 16, 16, 32),
    ("layer3", 256, 8, 32, 64),
    ("layer4", 512, 4, 64, 128),
]
BATCH = 32


def run() -> None:
    worst = 0.0
    for stage, channels, pixels, r1, r2 in STAGES:
        for width in (0.25, 0.5, 0.75, 1.0):
            size = int(channels * width)
            ratio = _ratio(size, pixels, Composition(r1=r1, r2=r2))
            note(f"flanc {stage} x{width}: {ratio:.2f} of dense")
            emit(f"flanc_{stage}_x{width}_step_over_dense", ratio, "ratio", "<= 1.2")
            worst = max(worst, ratio)
    emit("flanc_worst_layer_step_over_dense", worst, "ratio", "<= 1.2")


def _ratio(size: int, pixels: int, scheme: Composition) -> float:
    dense = nn.Conv2d(size, size, 3, padding=1, bias=False)
    factored = factorize(dense, scheme)
    x = torch.randn(BATCH, size, pixels, pixels, requires_grad=True)

    def step(layer: nn.Module) -> None:
        layer(x).sum().backward()

    seconds = medians({"dense": lambda: step(dense), "flanc": lambda: step(factored)}, repeats=15, warmup=3)
    return seconds["flanc"] / seconds["dense"]
