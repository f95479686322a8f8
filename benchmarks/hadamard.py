"""A training step of FedPara's VGG16 against the same step of the dense network."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.harness import emit, medians, note
from fedfactor.factor.hadamard import Hadamard
from fedfactor.models import build
from fedfactor.nn import factorize

# gamma, batch, largest ratio to the dense step, repeats.
CASES = ((0.1, 64, 1.10, 7), (0.1, 16, 1.45, 15), (0.5, 64, 1.25, 7))


def training_step(model: nn.Module, batch: int, channels_last: bool = False) -> Callable[[], object]:
    """Return a function that makes one step: forward, cross-entropy, backward, plain SGD."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (batch,), generator=generator)
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def run() -> None:
    """Time the dense network in both memory formats, and take the default one as the reference."""
    torch.manual_seed(0)
    for gamma, batch, target, repeats in CASES:
        dense = build("vgg16")
        generator = torch.Generator().manual_seed(0)
        skip = ["features.0", "classifier"]
        factored = factorize(dense, Hadamard(gamma=gamma), skip=skip, generator=generator)
        steps = {
            "dense": training_step(dense, batch),
            "FedPara": training_step(factored, batch),
            "dense, channels last": training_step(build("vgg16"), batch, channels_last=True),
        }
        seconds = medians(steps, repeats, warmup=2)
        note(f"gamma {gamma}, batch {batch}: " + ", ".join(f"{k} {1e3 * v:.0f} ms" for k, v in seconds.items()))
        name = f"hadamard_vgg16_step_gamma_{gamma}_batch_{batch}"
        emit(name, seconds["FedPara"] / seconds["dense"], "x dense", f"<= {target:.2f}")
        emit(
            f"{name}_channels_last",
            seconds["FedPara"] / seconds["dense, channels last"],
            "x dense",
            "none, for comparison",
        )
