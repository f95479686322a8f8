"""FLANC's layers against the dense convolutions of the same width, forward and backward, at batch 32."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.harness import emit, medians, note
from fedfactor.factor import Composition
from fedfactor.models import build
from fedfactor.nn import FactorWeight, factor_weights, factorize
from fedfactor.tables.flanc import CNN_BASES, RESNET_BASES

BATCH = 32
NETWORKS = {"resnet18": ((3, 32, 32), RESNET_BASES), "cnn4": ((1, 28, 28), CNN_BASES)}


def run() -> None:
    measured: dict[tuple[object, ...], float] = {}
    worst, where = 0.0, ""
    for name, (image, bases) in NETWORKS.items():
        for width in (0.25, 0.5, 0.75, 1.0):
            options = {"scale_stem": False} if name == "resnet18" else {}
            dense = build(name, width=width, **options)
            factored = factorize(dense, Composition(), skip=_others(dense, bases), per_layer=bases)
            inputs = _inputs(dense, torch.randn(2, *image))
            for layer, weight in factor_weights(factored).items():
                key = (weight.scheme, weight.shape, inputs[layer])
                if key not in measured:
                    measured[key] = _ratio(dense.get_submodule(layer), weight, inputs[layer])
                    note(f"flanc {name} x{width} {layer}: {measured[key]:.2f} of dense")
                    emit(f"flanc_{name}_x{width}_{layer}_step_over_dense", measured[key], "ratio", "<= 1.2")
                if measured[key] > worst:
                    worst, where = measured[key], f"{name} x{width} {layer}"
    note(f"worst: {where}")
    emit("flanc_worst_layer_step_over_dense", worst, "ratio", "<= 1.2")


def _others(model: nn.Module, bases: dict[str, object]) -> list[str]:
    """Name what stays dense: all layers but the 3 x 3 convolutions behind the stem."""
    found = [n for n, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    return [name for name in found if (name in ("conv1", "head", "fc") and name not in bases) or "downsample" in name]


def _inputs(model: nn.Module, example: torch.Tensor) -> dict[str, tuple[int, ...]]:
    """Return the size of what goes into every convolution."""
    sizes: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(
                lambda _, given, name=name: sizes.update({name: tuple(given[0].shape[1:])})
            )
    model(example)
    for module in model.modules():
        module._forward_pre_hooks.clear()
    return sizes


def _ratio(dense: nn.Module, factored: FactorWeight, size: tuple[int, ...]) -> float:
    x = torch.randn(BATCH, *size, requires_grad=True)

    def step(layer: nn.Module) -> None:
        layer(x).sum().backward()

    seconds = medians({"dense": lambda: step(dense), "flanc": lambda: step(factored)}, repeats=11, warmup=2)
    return seconds["flanc"] / seconds["dense"]
