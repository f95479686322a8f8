"""How far a run starts from the weights of the model that it was given, and a warning if it discards trained ones."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedfactor.nn import compose
from fedfactor.nn.norms import NORMS
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.setup import Setup
from fedfactor.rng import derive, seeded

ROUNDING = 1e-5
"""Relative errors below this are rounding, such as that of a decomposition at full rank."""
SIDE = 256
"""Rows and columns of a weight that are tested: larger tests take longer and find no more."""
ORDERS = 16
"""Number of random orders that a weight is compared with."""
DEVIATIONS, RATIO = 15.0, 1.05
"""By how much the largest singular value of a trained weight exceeds its mean over random orders of the entries: in
standard deviations, and at least as a ratio, because the deviation of constant weights is only rounding."""


def given_model(setup: Setup) -> nn.Module:
    """Build the task's model with the initial values that the method gets."""
    with seeded(derive(setup.training.seed, "init")):
        return compose(setup.build(), shared=True)


def start_errors(initial: nn.Module, given: nn.Module) -> dict[str, float]:
    """Return ||W' - W|| / ||W|| for each weight W of the given model that the method's network starts with as W'.

    Weights that are the same up to rounding are left out, and so are weights without a counterpart.
    """
    start, found = tensors_of(compose(initial, shared=True)), {}
    for name, weight in tensors_of(given).items():
        if weight.dim() > 1 and name in start and start[name].shape == weight.shape:
            wanted = weight.double().cpu()
            distance, size = (float(torch.linalg.vector_norm(x)) for x in (start[name].double().cpu() - wanted, wanted))
            if distance > ROUNDING * size:
                found[name] = distance / size if size else float("inf")
    return found


def lost_weights(setup: Setup, given: nn.Module, errors: dict[str, float]) -> str:
    """Return a warning if the method discards weights that look trained, and otherwise an empty string.

    A start that is further from a weight than 0 is has nothing of it.
    """
    lost = [name for name, error in errors.items() if error > 1]
    sign = trained(given, lost) if lost else ""
    if not sign:
        return ""
    method, layers = setup.method, ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
    keeps = "use a method that keeps the weights, such as fedavg or feddecomp"
    if "start" in {field.name for field in fields(method)}:
        keeps = f'set start = "given" (in a recipe: method.start = "given"), or {keeps}'
    return (
        f"{method.name} discards the values of {layers}, but the model does not look freshly initialised: {sign}. "
        f"To start from the model's weights, {keeps}"
    )


def trained(model: nn.Module, names: list[str]) -> str:
    """Return a sign that a model has been trained, or an empty string if there is none.

    All usual initialisations set norm layers to constants, make biases constant or draw them as torch does, and draw
    the entries of these weights independently, or make them orthogonal or constant. Training changes the constants, and
    makes biases and the largest singular values grow. Models that were trained only a little may show none of these
    signs.
    """
    for name, module in model.named_modules():
        if isinstance(module, NORMS) and any(
            t.numel() and (t != t.flatten()[0]).any() for t in tensors_of(module).values()
        ):
            return f"the values of the norm layer {name} differ from each other"
    weights = tensors_of(model)
    for name in names:
        if _ordered(weights[name]):
            return f"the entries of {name} are not independent of each other"
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, _ConvNd)) and module.bias is not None and _grown(module.bias, module.weight):
            return f"the bias of {name} has values that differ and are larger than torch draws them"
    return ""


def _grown(bias: Tensor, weight: Tensor) -> bool:
    """Return whether a bias is neither constant nor within the bound of torch's initialisation, 1 / sqrt(fan-in)."""
    bound = (1 + ROUNDING) / max(weight[0].numel(), 1) ** 0.5 if len(weight) else 0.0
    return bool((bias != bias[:1]).any() and bias.detach().abs().max() > bound)


def _ordered(weight: Tensor) -> bool:
    """Return whether the largest singular value is far larger than in random orders of the entries."""
    matrix = weight.float().cpu().flatten(1)[:SIDE, :SIDE]
    rng = torch.Generator().manual_seed(0)  # of its own, so that the result depends only on the weight
    orders = [torch.randperm(matrix.numel(), generator=rng) for _ in range(ORDERS)]
    tried = torch.stack([matrix.flatten()[order].view_as(matrix) for order in orders])
    norms: Tensor = torch.linalg.matrix_norm(tried, 2)
    largest, mean = torch.linalg.matrix_norm(matrix, 2), norms.mean()
    return bool(largest > RATIO * mean and largest > mean + DEVIATIONS * norms.std())
