"""The tensors of a model, each once: what a client holds, sends and keeps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; a tensor known under two names (tied weights) under its first only."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def fill(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy tensors into a model; they must be exactly its own."""
    own = tensors_of(model)
    if own.keys() != tensors.keys():
        missing, foreign = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
        raise ValueError(f"the model lacks values for {missing[:3]} and has no place for {foreign[:3]}")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, the values given are {list(tensors[name].shape)}")
        tensor.copy_(tensors[name])


@torch.no_grad()
def answers_with(model: nn.Module, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return what a model would answer with other tensors in it: in evaluation mode, and itself left as it is."""
    own, training = tensors_of(model), model.training
    model.eval()
    try:
        values = {name: tensor.to(own[name].dtype) for name, tensor in tensors.items()}
        answers: Tensor = functional_call(model, values, (x,))
    finally:
        model.train(training)
    return answers
