"""The hooks of an optimizer, with plain averaging as their default.

An optimizer defines the steps of the clients and of the server. Client hooks get the client's tensors, server hooks the
server's. Extra tensors that are sent between them have the names of the model's tensors and use the model's plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.context import Context
from fedfactor.protocol.plan import Held, Tensors

State = dict[str, Tensors]
"""The state of an optimizer on the server: named sets of tensors in the server's space."""


@dataclass(frozen=True)
class Step:
    """The input of the server's step. Its tensors are the trained weights, without buffers."""

    server: Tensors
    """The weights before the step."""
    mean: Tensors
    """The mean of the clients' weights."""
    held: Held
    """The number of clients that held each element."""
    state: State
    """The optimizer's state on the server."""
    extras: Tensors
    """The sum of what clients sent with the model (`finish`), in the server's space; only what was sent."""
    population: int
    """The number of all clients, not only of this round's."""


@dataclass(frozen=True)
class Optimizer:
    """Plain averaging: clients take plain steps, and the server takes the mean of their models."""

    name: ClassVar[str] = ""
    keeps_state: ClassVar[bool] = False
    """Whether clients keep tensors between rounds."""
    anchors: ClassVar[bool] = False
    """Whether clients are kept near the model they downloaded."""
    needs_sgd: ClassVar[bool] = False
    """Whether the algebra holds only if clients take steps of SGD that start without momentum."""
    uniform: ClassVar[bool] = False
    """Whether all clients have equal weight in the mean, whatever their number of examples."""

    def start(self, weights: Tensors) -> State:
        """Return the server's state before the first round; `weights` are the tensors that are trained."""
        return {}

    def broadcast(self, state: State) -> Tensors:
        """Return the tensors that are sent to clients with the model, in the server's space."""
        return {}

    def expected(self, down: Tensors) -> Tensors:
        """Return tensors like those that must be uploaded with the model, given those that were downloaded with it."""
        return {}

    def correct(self, parameters: Mapping[str, nn.Parameter], ctx: Context) -> None:
        """Change the gradients of a client's step in place."""

    def finish(self, shared: Tensors, ctx: Context) -> tuple[Tensors, Tensors]:
        """Return the tensors that are uploaded with the model, and those that the client keeps.

        `shared` is the upload as the server will decode it, so that both sides see the same change.
        """
        return {}, {}

    def refuses(self, codec: Codec) -> str | None:
        """Return the reason why this optimizer cannot be combined with a codec, or `None`."""
        return None

    def step(self, step: Step) -> tuple[Tensors, State]:
        """Return the server's new weights and state."""
        return step.mean, step.state


def is_held(held: Tensor | float, like: Tensor) -> Tensor:
    """Return a mask of the elements that at least one client held."""
    return held > 0 if isinstance(held, Tensor) else torch.full_like(like, held > 0, dtype=torch.bool)
