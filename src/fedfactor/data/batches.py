"""Batches of any structure: what a model gets, the targets, and moving all tensors to where a model is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Batch = Any
"""`(inputs, targets)`, or whatever `collate` returns: tensors in nested tuples, lists and mappings."""

SEQUENCES = (tuple, list)
LABELS = ("labels", "label", "targets", "target")
"""Keys under which a mapping may have its targets."""


def arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model: x of `(x, y)` or the batch itself, and all entries of a mapping by name."""
    if isinstance(batch, SEQUENCES):
        return (batch[0],), {}
    return ((), dict(batch)) if isinstance(batch, Mapping) else ((batch,), {})


def targets_of(batch: Batch) -> Tensor:
    """Return the targets of a batch. Raise ValueError if it has none."""
    found, where = None, "as the second part of a tuple (inputs, targets)"
    if isinstance(batch, SEQUENCES):
        if len(batch) > 2:
            raise ValueError(
                f"a batch has {len(batch)} parts, so it is not clear which one has the targets: return (inputs, "
                "targets) or a mapping, or give a loss and metrics of your own"
            )
        found = batch[1] if len(batch) > 1 else None
    elif isinstance(batch, Mapping):
        found = next((batch[key] for key in LABELS if key in batch), None)
        where = f"under one of the keys {', '.join(LABELS)}; its keys are {', '.join(map(str, batch))}"
    if not isinstance(found, Tensor):
        raise ValueError(f"a batch must have a tensor of targets {where}")
    return found


def like(batch: Batch, parameter: Tensor) -> Any:
    """Move all tensors of a batch to where a model is, and floating-point ones to its type."""
    return moved(batch, parameter.device, parameter.dtype)


def moved(batch: Batch, device: torch.device, dtype: torch.dtype) -> Any:
    """Move all tensors of a batch to a device, and floating-point ones to a type."""
    if isinstance(batch, Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else None)
    if type(batch) in SEQUENCES:
        return type(batch)([moved(part, device, dtype) for part in batch])
    if hasattr(batch, "to"):  # such as a packed sequence or a batch of graphs
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device, dtype) for key, value in batch.items()}
    if isinstance(batch, tuple):  # with names
        return type(batch)(*(moved(part, device, dtype) for part in batch))
    return batch


def outline(batch: Batch) -> Any:
    """Return the structure of a batch as JSON: types and shapes in place of tensors, `None` for other objects."""
    if isinstance(batch, Tensor):
        return {"dtype": str(batch.dtype).removeprefix("torch."), "shape": list(batch.shape)}
    if isinstance(batch, Mapping):
        return {"entries": {str(key): outline(value) for key, value in batch.items()}}
    return [outline(part) for part in batch] if type(batch) in (tuple, list) else None


def filled(found: Any, size: int, number: int = 0) -> Batch:
    """Return a batch of `size` examples that are all one number; `found` is the outline of a batch of one."""
    if isinstance(found, list):
        return [filled(part, size, number) for part in found]
    if found is None:
        return None
    if "entries" in found:
        return {key: filled(value, size, number) for key, value in found["entries"].items()}
    return torch.full((size, *found["shape"][1:]), number, dtype=getattr(torch, found["dtype"]))
