"""SGD on the clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedfactor.protocol.method import ParameterGroup
from fedfactor.protocol.settings import Training


class Descent:
    """SGD with momentum that calls the kernel of torch's fused SGD directly.

    Creating the first `torch.optim` optimizer imports torch's compiler, which takes seconds in each process. For small
    models, its overhead is also larger than the time of the step itself.
    """

    def __init__(
        self, training: Training, groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter], lr: float
    ) -> None:
        self._momentum = training.momentum
        self._groups = [
            (
                [parameters[name] for name in group.names if name in parameters],
                lr * group.lr_factor,
                training.weight_decay if group.weight_decay else 0.0,
            )
            for group in groups
        ]
        # A step writes to these detached views: cheaper than torch.no_grad() around each step.
        self._values = {parameter: parameter.detach() for parameter in parameters.values()}
        self._momenta: dict[nn.Parameter, Tensor] = {}

    def step(self) -> None:
        """Take one step; parameters without a gradient are unchanged."""
        for members, lr, decay in self._groups:
            moving = [parameter for parameter in members if parameter.grad is not None]
            if not self._momentum:
                self._move(moving, [], lr, decay)
                continue
            # The kernel has one flag for all tensors: whether this is their first step, which initialises the momentum.
            new = [parameter for parameter in moving if parameter not in self._momenta]
            old = [parameter for parameter in moving if parameter in self._momenta]
            self._momenta.update((parameter, torch.empty_like(parameter)) for parameter in new)
            self._move(old, [self._momenta[parameter] for parameter in old], lr, decay)
            self._move(new, [self._momenta[parameter] for parameter in new], lr, decay, first=True)

    def _move(
        self, moving: Sequence[nn.Parameter], momenta: list[Tensor], lr: float, decay: float, *, first: bool = False
    ) -> None:
        if not moving:
            return
        gradients = [parameter.grad for parameter in moving if parameter.grad is not None]
        torch._fused_sgd_(
            [self._values[parameter] for parameter in moving], gradients, momenta, lr=lr, momentum=self._momentum,
            weight_decay=decay, dampening=0.0, nesterov=False, maximize=False, is_first_step=first,
        )  # fmt: skip
