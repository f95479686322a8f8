"""Batch norms without running statistics, and with statistics that are fixed later (HeteroFL's static batch norm)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedfactor.nn.frozen import is_frozen

NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norms of a model by name, without those that use the statistics of a frozen base."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not is_frozen(module)
    }


def without_statistics(model: nn.Module) -> nn.Module:
    """Make the batch norms of a model use the statistics of each batch and store none; change and return the model."""
    for norm in batch_norms(model).values():
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    return model


def with_statistics(model: nn.Module, statistics: Mapping[str, Tensor]) -> nn.Module:
    """Give batch norms fixed means and variances, a (2, channels) tensor each; change and return the model."""
    for name, norm in batch_norms(model).items():
        if name in statistics:
            mean, variance = statistics[name].to(norm.weight) if norm.weight is not None else statistics[name]
            norm.track_running_stats = True
            norm.running_mean, norm.running_var = mean.clone(), variance.clone()
            norm.num_batches_tracked = torch.ones((), dtype=torch.long, device=mean.device)
    return model


def pooled(parts: Iterable[tuple[float, Tensor]]) -> Tensor:
    """Return mean and variance of all parts together, given the size and the (mean, variance) of each part.

    The variance contains that between the parts: the mean of var + mean^2, minus the square of the mean.
    """
    sizes, pairs = zip(*parts, strict=True)
    shares = pairs[0].new_tensor([size / sum(sizes) for size in sizes], dtype=torch.float64)
    means, variances = torch.stack(pairs, 1).double()
    mean = shares @ means
    return torch.stack([mean, shares @ (variances + (means - mean) ** 2)]).to(pairs[0].dtype)


@contextmanager
def watched_norms(model: nn.Module) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Record the inputs of the batch norms during a block, and yield a function that returns their statistics so far.

    The statistics have the form that `with_statistics` takes, pooled over the batches.
    """
    gathered: dict[str, list[tuple[int, Tensor]]] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].transpose(0, 1).flatten(1)
            gathered.setdefault(name, []).append((len(inputs[0]), torch.stack([x.mean(1), x.var(1)])))

        return hook

    def found() -> dict[str, Tensor]:
        return {name: pooled(seen) for name, seen in gathered.items()}

    handles = [norm.register_forward_pre_hook(watch(name)) for name, norm in batch_norms(model).items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def scaled_norm_inputs(model: nn.Module, factor: float) -> Iterator[None]:
    """Multiply the inputs of all norms by a factor during a block (HeteroFL's Scaler)."""

    def scale(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] * factor, *inputs[1:])

    handles = [m.register_forward_pre_hook(scale) for m in model.modules() if isinstance(m, NORMS)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def axis_blocks(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return, by tensor name, the number of equal blocks of the first axes: gates of recurrent layers, or heads.

    The heads of attention are blocks of q, k and v, and of the columns of its output projection: a narrower network has
    the same heads with fewer features each. 0 means that the layer cannot be reduced in width: after a bidirectional
    layer, both directions are concatenated.
    """
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.LSTMCell: 4, nn.GRUCell: 3}
    found: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        parts = next((count for kind, count in gates.items() if isinstance(module, kind)), 1)
        # These factors have the outputs of the weight along their first axis.
        fused = [key for key, _ in module.named_parameters() if "." not in key or key.endswith((".u", ".w", ".g"))]
        if getattr(module, "bidirectional", False):
            found.update({prefix + key: (0,) for key in fused})
        elif parts > 1:
            found.update({prefix + key: (parts,) for key in fused if "_hr_" not in key})
        elif isinstance(module, nn.MultiheadAttention):
            heads = module.num_heads
            found.update({prefix + key: (3 * heads,) for key in fused if key.startswith("in_proj")})
            found.update({f"{prefix}out_proj.{key}": (1, heads) for key in ("weight", "v")})
    return found
