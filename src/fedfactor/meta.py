"""What operations return on the meta device, whose tensors have shapes but no numbers.

Torch has rules of its own. They are written in Python: the first one that is called imports torch's compiler, which
takes seconds in each process, and each call takes a millisecond. Those here are for the operations of common networks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def result(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation. Return None if torch must find it: without a rule, or if there are numbers."""
    rule = RULES.get(operation)
    if rule is None or kwargs.keys() - {"alpha"} or not all(one.is_meta for one in args if isinstance(one, Tensor)):
        return None  # alpha, a factor, changes no shape
    return rule(*args)


def _like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _mm(x: Tensor, y: Tensor) -> Tensor | None:
    return x.new_empty(x.shape[0], y.shape[1]) if x.shape[1] == y.shape[0] and x.dtype == y.dtype else None


def _addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if x.shape[1] != weight.shape[0]:
        raise ValueError("the shapes do not fit")  # measured again with numbers, where torch says more
    return x.new_empty(x.shape[0], weight.shape[1])


def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any) -> tuple[Tensor, ...]:
    channels = x.shape[1] if training else 0
    return _like(x), x.new_empty(channels), x.new_empty(channels)


def _windows(x: Tensor, kernels: Any, strides: Any, paddings: Any, dilations: Any) -> list[int]:
    """Return how many windows fit along the height and the width of an image, or the dimensions of another input."""
    return [
        (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, padding, dilation in zip(
            x.shape[2:], kernels, strides, paddings, dilations, strict=True
        )
    ]


def _convolved(
    x: Tensor, weight: Tensor, bias: Any, strides: Any, paddings: Any, dilations: Any, transposed: bool, _: Any,
    groups: int,
) -> Tensor | None:  # fmt: skip
    if transposed or x.dim() != weight.dim() or x.shape[1] != groups * weight.shape[1] or len(strides) != x.dim() - 2:
        return None
    pixels = _windows(x, weight.shape[2:], strides, paddings, dilations)
    return x.new_empty(len(x), len(weight), *pixels) if min(pixels) > 0 else None


def _max_pool(
    x: Tensor, kernels: Any, strides: Any, paddings: Any = (0, 0), dilations: Any = (1, 1), ceil: bool = False
) -> tuple[Tensor, Tensor] | None:
    if x.dim() != 4 or not x.is_contiguous() or not len(kernels) == len(strides) == len(paddings) == len(dilations):
        return None
    shape = [*x.shape[:2], *_windows(x, kernels, strides, paddings, dilations)]
    return None if ceil or min(shape) < 1 else (x.new_empty(shape), x.new_empty(shape, dtype=torch.int64))


def _group_norm(
    x: Tensor, weight: Any, bias: Any, count: int, channels: int, area: int, groups: int, *_: Any
) -> tuple[Tensor, ...]:
    return _like(x), x.new_empty(count, groups), x.new_empty(count, groups)


def _mean(x: Tensor, dims: list[int] | None = None, keep: bool = False) -> Tensor:
    gone = {dim % x.dim() for dim in dims or range(x.dim())}
    return x.new_empty([1 if dim in gone else size for dim, size in enumerate(x.shape) if keep or dim not in gone])


def _pointwise(*args: Any) -> Tensor | None:
    """Return the result for real tensors of one type, if they have one shape or are contiguous."""
    first, *others = (one for one in args if isinstance(one, Tensor))
    if not first.is_floating_point() or any(isinstance(one, complex) for one in args):
        return None
    if any(one.dtype != first.dtype for one in others):
        return None
    if all(one.shape == first.shape for one in others):
        return _like(first)
    if all(one.is_contiguous() for one in (first, *others)):
        return first.new_empty(torch.broadcast_shapes(*(one.shape for one in (first, *others))))  # type: ignore[no-untyped-call]
    return None


RULES: dict[Any, Callable[..., Any]] = {
    aten.mm: _mm,
    aten.addmm: _addmm,
    aten.convolution: _convolved,
    aten.max_pool2d_with_indices: _max_pool,
    aten.native_batch_norm: _batch_norm,
    aten.native_group_norm: _group_norm,
    aten.mean: _mean,
    **dict.fromkeys((aten.relu, aten.hardtanh, aten.tanh, aten.sigmoid, aten.gelu, aten.silu), _pointwise),
    **dict.fromkeys((aten.add, aten.sub, aten.mul, aten.div), _pointwise),
}
"""What these operations return; None leaves it to torch."""
