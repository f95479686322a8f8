"""The steps of the clients' optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedfactor.protocol.method import ParameterGroup
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.settings import Training

States = dict[str, dict[str, Any]]
"""The state of an optimizer: tensors and numbers by the name of the parameter and their own name."""


class Descent(ABC):
    """An optimizer of a phase of local training."""

    @abstractmethod
    def step(self, lr: float) -> float:
        """Take a step with a learning rate; return how far a constant gradient of one would have moved a parameter.

        Parameters without a gradient are unchanged. The returned distance is meaningful for SGD only.
        """

    @abstractmethod
    def states(self) -> States:
        """Return the state of each parameter that has one."""


def descent(
    training: Training, groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter], states: States
) -> Descent:
    """Return the run's optimizer of the given parameters, which continues from `states`."""
    kind = FusedSGD if training.local_optimizer.name == "sgd" else TorchOptimizer
    return kind(training, groups, parameters, states)


class FusedSGD(Descent):
    """SGD that calls the kernel of torch's fused SGD directly.

    Creating the first `torch.optim` optimizer imports torch's compiler, which takes seconds in each process. For small
    models, its overhead is also larger than the time of the step itself.
    """

    def __init__(
        self,
        training: Training,
        groups: Sequence[ParameterGroup],
        parameters: Mapping[str, nn.Parameter],
        states: States,
    ) -> None:
        options = training.local_optimizer.options
        self._momentum, self._decay = training.momentum or 0.0, training.weight_decay or 0.0
        self._dampening = float(options["dampening"]) if self._momentum else 0.0
        self._nesterov = bool(options["nesterov"])
        self._groups = [([parameters[name] for name in group.names if name in parameters], group) for group in groups]
        # A step writes to these detached views: cheaper than torch.no_grad() around each step.
        self._values = {parameter: parameter.detach() for parameter in parameters.values()}
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._momenta = {
            parameter: states[name]["momentum_buffer"] for name, parameter in parameters.items() if name in states
        }
        self._sum = 0.0  # the momentum of a constant gradient of one

    def step(self, lr: float) -> float:
        """Take a step."""
        for members, group in self._groups:
            moving = [parameter for parameter in members if parameter.grad is not None]
            rate, decay = lr * group.lr_factor, self._decay if group.weight_decay else 0.0
            if not self._momentum:
                self._move(moving, [], rate, decay)
                continue
            # The kernel has one flag for all tensors: whether this is their first step, which initialises the momentum.
            new = [parameter for parameter in moving if parameter not in self._momenta]
            old = [parameter for parameter in moving if parameter in self._momenta]
            self._momenta.update((parameter, torch.empty_like(parameter)) for parameter in new)
            self._move(old, [self._momenta[parameter] for parameter in old], rate, decay)
            self._move(new, [self._momenta[parameter] for parameter in new], rate, decay, first=True)
        self._sum = self._momentum * self._sum + (1.0 - self._dampening if self._sum else 1.0)
        return lr * (1.0 + self._momentum * self._sum if self._nesterov else self._sum)

    def _move(
        self, moving: Sequence[nn.Parameter], momenta: list[Tensor], lr: float, decay: float, *, first: bool = False
    ) -> None:
        if not moving:
            return
        gradients = [parameter.grad for parameter in moving if parameter.grad is not None]
        torch._fused_sgd_(
            [self._values[parameter] for parameter in moving], gradients, momenta, lr=lr, momentum=self._momentum,
            weight_decay=decay, dampening=self._dampening, nesterov=self._nesterov, maximize=False, is_first_step=first,
        )  # fmt: skip

    def states(self) -> States:
        """Return the momenta."""
        return {self._names[parameter]: {"momentum_buffer": value} for parameter, value in self._momenta.items()}


class TorchOptimizer(Descent):
    """An optimizer of `torch.optim`, or of your own."""

    def __init__(
        self,
        training: Training,
        groups: Sequence[ParameterGroup],
        parameters: Mapping[str, nn.Parameter],
        states: States,
    ) -> None:
        chosen = training.local_optimizer
        shared = {"lr": training.lr, "momentum": training.momentum, "weight_decay": training.weight_decay}
        options = {key: value for key, value in shared.items() if key in chosen.parameters} | {**chosen.options}
        if chosen.name in FUSED:
            options["fused"] = True
        members = [([parameters[name] for name in group.names if name in parameters], group) for group in groups]
        made = [
            {"params": some} | ({} if group.weight_decay else {"weight_decay": 0.0}) for some, group in members if some
        ]
        self._factors = [group.lr_factor for some, group in members if some]
        try:
            self._optimizer = chosen.torch_class(made, **options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"train.optimizer: {chosen.name}: {error}") from error
        self._parameters = parameters
        for name, parameter in parameters.items():
            if name in states:
                self._optimizer.state[parameter] = states[name]

    def step(self, lr: float) -> float:
        """Take a step."""
        for group, factor in zip(self._optimizer.param_groups, self._factors, strict=True):
            group["lr"] = lr * factor
        self._optimizer.step()
        return lr

    def states(self) -> States:
        """Return the optimizer's own states."""
        held = self._optimizer.state
        return {name: held[parameter] for name, parameter in self._parameters.items() if parameter in held}


FUSED = ("adam", "adamw", "adagrad")
"""Optimizers for which torch has fused kernels."""


def state_tensors(training: Training) -> int:
    """Return how many tensors of the size of the weights the run's optimizer keeps, after a step on a small parameter.

    Raise ValueError if the optimizer does not take its options.
    """
    weight = nn.Parameter(torch.zeros(2, 3))
    weight.grad = torch.zeros_like(weight)
    tried = descent(training, [ParameterGroup(["weight"])], {"weight": weight}, {})
    tried.step(0.0)
    found = tried.states().get("weight", {}).values()
    return sum(isinstance(value, Tensor) and value.shape == weight.shape for value in found)


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
