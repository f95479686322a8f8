"""The tensors of a model that are trained or kept, each once: reading them, and filling them in."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedfactor.nn.frozen import Frozen, base_buffer_ids


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, without those of a frozen base.

    A tensor with two names (tied weights) appears only under its first.
    """
    seen = base_buffer_ids(model)
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and type(tensor) is not Frozen:  # isinstance is slow for classes of parameters
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def fill(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy tensors into a model. Raise ValueError if names or shapes are not those of the model."""
    own = tensors_of(model)
    if own.keys() != tensors.keys():
        missing, foreign = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
        raise ValueError(f"values for {missing[:3]} are missing, and the model has no tensors {foreign[:3]}")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, the values given are {list(tensors[name].shape)}")
        tensor.copy_(tensors[name])


@torch.no_grad()
def answers_with(model: nn.Module, tensors: dict[str, Tensor], *args: Any, **named: Any) -> Any:
    """Return the output of a model with other tensors, in evaluation mode. The model itself does not change."""
    own, training = tensors_of(model), model.training
    model.eval()
    try:
        values = {name: tensor.to(own[name].dtype) for name, tensor in tensors.items()}
        answers = functional_call(model, values, args, named)
    finally:
        model.train(training)
    return answers


def weights_sha256(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 over names, types, shapes and values of tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
