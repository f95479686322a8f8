"""The frozen base of a model: tensors that are never trained, and that server and clients both have.

They are in no message, client state or checkpoint. Both sides build them from the same model, and compare their hash.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn


class Frozen(nn.Parameter):
    """A parameter of the base. Unlike other parameters, copies of a model share its memory."""

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Frozen:
        """Return the tensor as a frozen parameter; `requires_grad` exists because torch's parameters have it."""
        return super().__new__(cls, data.detach(), requires_grad=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Frozen:
        """Return another parameter with the same memory, so that moving one to a device does not move the other."""
        if id(self) not in memo:
            memo[id(self)] = Frozen(self.data)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as what it is."""
        return Frozen, (self.data,)


def freeze(model: nn.Module, names: Collection[str] | None = None) -> nn.Module:
    """Make these tensors of a model its base; change and return the model.

    Without names, the base consists of all parameters that do not require a gradient, and of the buffers of modules
    whose parameters are all frozen. For a module without parameters, the module that contains it decides.
    """
    found = frozen_names(model) if names is None else names
    made: dict[int, Frozen] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for key, parameter in module._parameters.items():
            if parameter is not None and prefix + key in found and not isinstance(parameter, Frozen):
                module._parameters[key] = made.setdefault(id(parameter), Frozen(parameter))
        buffers = {key for key in module._buffers if prefix + key in found}
        if buffers - _base_buffers(module):
            module.__dict__[BUFFERS] = buffers | _base_buffers(module)
            module.register_forward_pre_hook(_evaluate)
    return model


def without_values(model: nn.Module) -> nn.Module:
    """Move a model to the meta device; change and return the model. Torch alone would make its base ordinary there."""
    frozen = {name for name, one in model.named_parameters(remove_duplicate=False) if isinstance(one, Frozen)}
    return freeze(model.to("meta"), frozen)


TUNED = "_tuned"
"""The attribute of a model that is fine-tuned: only its changes may be factorised, even if it has none."""


def mark_tuned(model: nn.Module, *, tuned: bool = True) -> nn.Module:
    """Say that a model is fine-tuned, or no longer; change and return the model."""
    model.__dict__[TUNED] = tuned
    return model


def is_tuned(model: nn.Module) -> bool:
    """Return whether a model is fine-tuned."""
    return bool(model.__dict__.get(TUNED))


BUFFERS = "_base_buffers"
"""The attribute of a module that lists the buffers that belong to the base."""


def _base_buffers(module: nn.Module) -> set[str]:
    found: set[str] = module.__dict__.get(BUFFERS, set())
    return found


def _evaluate(module: nn.Module, inputs: Any) -> None:
    """Let a module use its buffers as they are: a batch norm would replace them by statistics of the batch."""
    module.training = False


def frozen_names(model: nn.Module) -> set[str]:
    """Return the names of the tensors of a model that belong to its base: see `freeze`."""
    found = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}

    def visit(prefix: str, module: nn.Module, outer: bool) -> None:
        own = [parameter.requires_grad for parameter in module.parameters()]
        frozen = not any(own) if own else outer
        found.update(prefix + key for key, buffer in module._buffers.items() if frozen and buffer is not None)
        for key, child in module._modules.items():
            if child is not None:
                visit(f"{prefix}{key}.", child, frozen)

    visit("", model, False)
    return found


def is_frozen(module: nn.Module) -> bool:
    """Return whether a module uses buffers of the base, such as a batch norm with the base's statistics."""
    return bool(_base_buffers(module))


def base_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the base by name. A tensor with two names (tied weights) appears only under its first."""
    seen, found, buffers = set[int](), dict[str, Tensor](), base_buffer_ids(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (isinstance(tensor, Frozen) or id(tensor) in buffers) and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def base_buffer_ids(model: nn.Module) -> set[int]:
    """Return the ids of the buffers that belong to the base."""
    found, waiting = set[int](), [model]
    while waiting:  # faster than model.modules(): this runs several times for each client
        module = waiting.pop()
        if BUFFERS in module.__dict__:
            found.update(id(module._buffers[key]) for key in _base_buffers(module))
        waiting += filter(None, module._modules.values())
    return found


def released(model: nn.Module) -> nn.Module:
    """Turn the base into ordinary parameters and buffers with memory of their own; change and return the model."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if isinstance(parameter, Frozen):
                own = made.setdefault(id(parameter), nn.Parameter(parameter.data.clone(), requires_grad=False))
                module._parameters[key] = own
        if module.__dict__.pop(BUFFERS, None):
            hooks = module._forward_pre_hooks
            for number in [number for number, hook in hooks.items() if hook is _evaluate]:
                del hooks[number]
    return model
