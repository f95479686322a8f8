"""The objective: how a model is called on a batch, and the loss of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Batch = Any
"""`(inputs, targets)`, or whatever `collate` returns: tensors in nested tuples, lists and mappings."""
Loss = Callable[[Any, Batch], Tensor]
"""Takes the outputs of a model and the batch, and returns a scalar tensor."""

LABELS = ("labels", "label", "targets", "target")
"""Keys under which a mapping may have its targets."""


def arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model: x of `(x, y)` or the batch itself, and all entries of a mapping by name."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch[0] if isinstance(batch, tuple | list) else batch,), {}


def targets_of(batch: Batch) -> Tensor:
    """Return the targets of a batch. Raise ValueError if it has none."""
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in LABELS if key in batch), None)
        where = f"under one of the keys {', '.join(LABELS)}; its keys are {', '.join(map(str, batch))}"
    else:
        found = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
        where = "as the second part of a tuple (inputs, targets)"
    if not isinstance(found, Tensor):
        raise ValueError(f"a batch must have a tensor of targets {where}")
    return found


def logits_of(outputs: Any) -> Tensor:
    """Return the outputs, or their `logits`, with the classes along axis 1. Raise ValueError if there are none.

    Logits of Hugging Face's models of sequences have three axes, with the classes along the last one.
    """
    if isinstance(outputs, Tensor):
        return outputs
    found = getattr(outputs, "logits", None)
    if not isinstance(found, Tensor):
        raise ValueError(f"the model must return a tensor, or an object with `logits`, got a {type(outputs).__name__}")
    return found.movedim(-1, 1) if found.dim() == 3 else found


def like(batch: Any, parameter: Tensor) -> Any:
    """Move all tensors of a batch to where a model is, and floating-point ones to its type."""
    if isinstance(batch, Tensor):
        return batch.to(parameter.device, parameter.dtype if batch.is_floating_point() else None)
    if hasattr(batch, "to"):  # such as a packed sequence or a batch of graphs
        return batch.to(parameter.device)
    if isinstance(batch, Mapping):
        return {key: like(value, parameter) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [like(part, parameter) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def check_loss(loss: Any) -> None:
    """Raise ValueError if a loss is not a scalar tensor that a model can be trained with."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(
            f"the loss must be a scalar tensor, such as the mean over the examples of a batch, got {found}"
        )
    if not loss.requires_grad:
        raise ValueError("the loss has no gradient: compute it from the model's outputs, without detach() or item()")
    if loss.isnan():
        raise ValueError("the loss of the first examples is NaN before any training: check the loss and the data")


def masked_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Set the logits of classes that a client does not have to 0: they then push nothing down."""
    mask = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
    mask[labels.to(logits.device)] = True
    return logits.masked_fill(~mask, 0.0)


def _binary(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.flatten(), targets.flatten().to(logits.dtype))


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs.reshape(targets.shape), targets.to(outputs.dtype))


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "classification": F.cross_entropy,
    "binary": _binary,
    "language": F.cross_entropy,
    "regression": _squares,
}
"""The losses of the built-in kinds of tasks; a task of kind `custom` has a loss of its own."""


def divergence(logits: Tensor, teacher: Tensor, temperature: float, *, binary: bool) -> Tensor:
    """Return T^2 KL(teacher / T, logits / T), the mean over a batch.

    T^2 makes up for the gradient, which falls with the square of the temperature (Hinton et al. 2015).
    """
    if binary:  # one logit stands for the two classes' difference
        logits, teacher = (torch.stack([torch.zeros_like(t), t], 1) for t in (logits.flatten(), teacher.flatten()))
    wanted, found = (F.log_softmax(each / temperature, 1) for each in (teacher.detach(), logits))
    return temperature**2 * (wanted.exp() * (wanted - found)).sum(1).mean()
