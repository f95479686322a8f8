"""Local optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedfactor.protocol.method import Group
from fedfactor.protocol.settings import Training


class Descent:
    """SGD with momentum: the kernel of torch's own fused one, called without the optimizer around it.

    Torch's optimizer objects import its compiler when the first is made, which takes seconds in every process, and
    spend more time on a step of a small model than the step itself takes.
    """

    def __init__(
        self, training: Training, groups: Sequence[Group], parameters: Mapping[str, nn.Parameter], lr: float
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
        # Where a step writes without autograd's knowing: cheaper than telling it to look away at every step.
        self._values = {parameter: parameter.detach() for parameter in parameters.values()}
        self._pulls: dict[nn.Parameter, Tensor] = {}

    def step(self) -> None:
        """Step along the gradients; parameters without one stay."""
        for members, lr, decay in self._groups:
            moving = [parameter for parameter in members if parameter.grad is not None]
            if not self._momentum:
                self._move(moving, [], lr, decay)
                continue
            # The kernel takes one word for all: whether their first gradients start the pulls.
            new = [parameter for parameter in moving if parameter not in self._pulls]
            old = [parameter for parameter in moving if parameter in self._pulls]
            self._pulls.update((parameter, torch.empty_like(parameter)) for parameter in new)
            self._move(old, [self._pulls[parameter] for parameter in old], lr, decay)
            self._move(new, [self._pulls[parameter] for parameter in new], lr, decay, first=True)

    def _move(
        self, moving: Sequence[nn.Parameter], pulls: list[Tensor], lr: float, decay: float, *, first: bool = False
    ) -> None:
        if not moving:
            return
        gradients = [parameter.grad for parameter in moving if parameter.grad is not None]
        torch._fused_sgd_(
            [self._values[parameter] for parameter in moving], gradients, pulls, lr=lr, momentum=self._momentum,
            weight_decay=decay, dampening=0.0, nesterov=False, maximize=False, is_first_step=first,
        )  # fmt: skip
