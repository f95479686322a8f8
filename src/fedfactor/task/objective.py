"""The objective: how a model is called on a batch, and the loss of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedfactor.data.batches import Batch

Loss = Callable[[Any, Batch], Tensor]
"""Takes the outputs of a model and the batch, and returns a scalar tensor."""


IGNORED = -100
"""The target of positions without an answer, such as padding: torch's cross-entropy leaves them out, and so do we."""


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
    dtype = torch.promote_types(outputs.dtype, torch.float32)  # bfloat16 would round the targets
    return F.mse_loss(outputs.reshape(targets.shape).to(dtype), targets.to(dtype))


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "classification": F.cross_entropy,
    "binary": _binary,
    "language": F.cross_entropy,
    "regression": _squares,
}
"""The losses of the built-in kinds of tasks; a task of kind `custom` has a loss of its own."""


def loss_name(loss: Loss) -> str:
    """Return the name of a loss, by which a resumed run recognises it."""
    named = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{named.__module__}:{named.__qualname__}"


def divergence(logits: Tensor, teacher: Tensor, temperature: float, *, binary: bool) -> Tensor:
    """Return T^2 KL(teacher / T, logits / T), the mean over a batch.

    T^2 makes up for the gradient, which falls with the square of the temperature (Hinton et al. 2015).
    """
    if binary:  # one logit stands for the two classes' difference
        logits, teacher = (torch.stack([torch.zeros_like(t), t], 1) for t in (logits.flatten(), teacher.flatten()))
    wanted, found = (F.log_softmax(each / temperature, 1) for each in (teacher.detach(), logits))
    return temperature**2 * (wanted.exp() * (wanted - found)).sum(1).mean()
