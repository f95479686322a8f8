"""The steps of the clients' optimizers."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedfactor.protocol.local_optimizer import SHORT
from fedfactor.protocol.method import ParameterGroup, Phase
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.settings import Training

States = dict[str, dict[str, Any]]
"""The state of an optimizer: tensors and numbers by the name of the parameter and their own name."""


class Descent(ABC):
    """An optimizer of a phase of local training, which continues from the states of an earlier one."""

    def __init__(
        self,
        training: Training,
        groups: Sequence[ParameterGroup],
        parameters: Mapping[str, nn.Parameter],
        states: States,
    ) -> None:
        self._training, self._options, self._parameters = training, training.local_optimizer.options, parameters
        members = [([parameters[name] for name in group.names if name in parameters], group) for group in groups]
        self._groups = [(some, group) for some, group in members if some]
        self._states: dict[Tensor, dict[str, Any]] = {
            parameters[name]: state for name, state in states.items() if name in parameters
        }

    @abstractmethod
    def step(self, lr: float) -> float:
        """Take a step with a learning rate; return how far a constant gradient of one would have moved a parameter.

        Parameters without a gradient are unchanged. The returned distance is meaningful for SGD only.
        """

    def states(self) -> States:
        """Return the state of each parameter that has one."""
        held = self._states
        return {name: held[parameter] for name, parameter in self._parameters.items() if parameter in held}


Moving = tuple[nn.Parameter, Tensor, Tensor]
"""A parameter, a view of its values, and its gradient."""


class Fused(Descent):
    """An optimizer that calls the kernel of torch's fused one directly.

    Creating the first `torch.optim` optimizer imports torch's compiler, which takes seconds in each process. For small
    models, its overhead is also larger than the time of the step itself.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # A step writes to these detached views: cheaper than torch.no_grad() around each step.
        self._views = [([(one, one.detach()) for one in members], group) for members, group in self._groups]

    def step(self, lr: float) -> float:
        """Take a step."""
        decay = self._training.weight_decay or 0.0
        for members, group in self._views:
            moving = [(one, view, grad) for one, view in members if (grad := one.grad) is not None]
            if moving:
                self._move(moving, lr * group.lr_factor, decay if group.weight_decay else 0.0)
        return lr

    @abstractmethod
    def _move(self, moving: Sequence[Moving], lr: float, decay: float) -> None:
        """Take a step of parameters that have a gradient."""


class FusedSGD(Fused):
    """SGD, with or without momentum."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._momentum, self._nesterov = self._training.momentum or 0.0, bool(self._options["nesterov"])
        self._dampening = float(self._options["dampening"]) if self._momentum else 0.0
        self._sum = 0.0  # the momentum of a constant gradient of one
        self._kernel = functools.partial(
            torch._fused_sgd_,
            momentum=self._momentum, dampening=self._dampening, nesterov=self._nesterov, maximize=False,
        )  # fmt: skip

    def step(self, lr: float) -> float:
        """Take a step."""
        super().step(lr)
        self._sum = self._momentum * self._sum + (1.0 - self._dampening if self._sum else 1.0)
        return lr * (1.0 + self._momentum * self._sum if self._nesterov else self._sum)

    def _move(self, moving: Sequence[Moving], lr: float, decay: float) -> None:
        # The kernel has one flag for all tensors: whether this is their first step, which initialises the momentum.
        parts = [(moving, False)]
        if self._momentum:
            new = [one for one in moving if one[0] not in self._states]
            parts = [([one for one in moving if one[0] in self._states], False), (new, True)]
            self._states.update((one, {"momentum_buffer": torch.empty_like(one)}) for one, _, _ in new)
        for part, first in parts:
            if part:
                ends = [view for _, view, _ in part], [grad for _, _, grad in part]
                momenta = [self._states[one]["momentum_buffer"] for one, _, _ in part] if self._momentum else []
                self._kernel(*ends, momenta, lr=lr, weight_decay=decay, is_first_step=first)


class FusedAdam(Fused):
    """Adam and AdamW."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        (beta1, beta2), eps, self._amsgrad = (self._options[key] for key in ("betas", "eps", "amsgrad"))
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1 and eps >= 0):
            raise ValueError(f"betas should be in [0, 1) and eps at least 0, got {beta1}, {beta2} and {eps}")
        adam = self._training.local_optimizer.name == "adam"
        self._kernel = functools.partial(
            torch._fused_adam_ if adam else torch._fused_adamw_,
            beta1=beta1, beta2=beta2, eps=eps, amsgrad=self._amsgrad, maximize=False,
        )  # fmt: skip
        self._keys = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self._amsgrad else []))

    def _move(self, moving: Sequence[Moving], lr: float, decay: float) -> None:
        for new in [one for one, _, _ in moving if one not in self._states]:
            step = torch.zeros((), dtype=torch.float32, device=new.device)
            self._states[new] = {"step": step, **{key: torch.zeros_like(new) for key in self._keys}}
        states = [self._states[one] for one, _, _ in moving]
        ends = [view for _, view, _ in moving], [grad for _, _, grad in moving]
        steps, averages = [state["step"] for state in states], [[state[key] for state in states] for key in self._keys]
        torch._foreach_add_(steps, 1)
        self._kernel(*ends, *averages, *([] if self._amsgrad else [[]]), steps, lr=lr, weight_decay=decay)


class TorchOptimizer(Descent):
    """An optimizer of `torch.optim`, or of your own."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        training, chosen = self._training, self._training.local_optimizer
        shared = {key: getattr(training, key) for key in SHORT if key in chosen.parameters}
        kernel: dict[str, Any] = (
            {"fused": True} if (chosen.name, training.torch_device.type) == ("adagrad", "cpu") else {}
        )
        groups = [
            {"params": members} | ({} if group.weight_decay else {"weight_decay": 0.0})
            for members, group in self._groups
        ]
        self._optimizer = chosen.torch_class(groups, **shared, **self._options, **kernel)
        self._optimizer.state.update(self._states)
        self._states = self._optimizer.state

    def step(self, lr: float) -> float:
        """Take a step."""
        for group, (_, settings) in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["lr"] = lr * settings.lr_factor
        self._optimizer.step()
        return lr


KERNELS: dict[str, type[Descent]] = {"sgd": FusedSGD, "adam": FusedAdam, "adamw": FusedAdam}
"""Optimizers whose kernels are called directly: measured, a step of AdamW takes a third of the time on small models."""


def descent(
    training: Training, groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter], states: States
) -> Descent:
    """Return the run's optimizer of the given parameters, which continues from `states`.

    Raise ValueError if the optimizer does not take its options.
    """
    name = training.local_optimizer.name
    try:
        return KERNELS.get(name, TorchOptimizer)(training, groups, parameters, states)
    except (TypeError, ValueError) as error:
        raise ValueError(f"train.optimizer: {name}: {error}") from error


def state_tensors(training: Training) -> int:
    """Return how many tensors of the size of the weights the run's optimizer keeps, after a step on a small parameter.

    Raise ValueError if the optimizer does not take its options.
    """
    weight = nn.Parameter(torch.zeros(2, 3))
    weight.grad = torch.zeros_like(weight)
    tried = descent(training, [ParameterGroup(["weight"])], {"weight": weight}, {})
    try:
        tried.step(0.0)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"train.optimizer: {training.local_optimizer.name}: {error}") from error
    found = tried.states().get("weight", {}).values()
    return sum(isinstance(value, Tensor) and value.shape == weight.shape for value in found)


def check_optimizer(training: Training, phases: Sequence[Phase], network: nn.Module, trained: Collection[str]) -> None:
    """Raise ValueError if the run's optimizer does not take its options or these parameters."""
    state_tensors(training)
    for phase in phases:
        descent(training, phase.groups, {name: p for name, p in network.named_parameters() if name in trained}, {})


# What a client keeps of the state: a tensor per value, and no code.

NUMBER = "#"
"""The end of a name whose value is a Python number; all other values are tensors."""


def packed(states: States, name: str) -> Tensors:
    """Return states as tensors. Raise ValueError if a value of the optimizer `name` is neither tensor nor number."""
    found: Tensors = {}
    for parameter, values in states.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                found[f"{key}/{parameter}"] = value
            elif isinstance(value, (bool, int, float)):
                exact = torch.float64 if isinstance(value, float) else None
                found[f"{key}{NUMBER}/{parameter}"] = torch.tensor(value, dtype=exact)
            else:
                kind = type(value).__name__
                raise ValueError(f"optimizer.keep_state: {key!r} of {name} is a {kind}, not a tensor or a number")
    return found


def unpacked(tensors: Tensors) -> States:
    """Return the states of `packed`; the tensors are copies, which the optimizer may change."""
    found: States = {}
    for full, tensor in tensors.items():
        key, _, parameter = full.partition("/")
        value = tensor.item() if key.endswith(NUMBER) else tensor.clone()
        found.setdefault(parameter, {})[key.removesuffix(NUMBER)] = value
    return found
