"""The hooks of an optimizer, with plain averaging as their default.

An optimizer says how a client steps and how the server steps. Client hooks see the client's tensors, server hooks the
server's; what travels between them is by name, through the same plan as the model itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.context import Context
from fedfactor.protocol.plan import Held, Reply, Tensors

State = dict[str, Tensors]
"""What an optimizer keeps on the server: named sets of tensors in the server's space."""


@dataclass(frozen=True)
class Step:
    """What the server knows when it steps; the tensors are its trained weights, without buffers."""

    server: Tensors
    """The weights as they are."""
    mean: Tensors
    """The weights as the clients' mean has them."""
    held: Held
    """How many clients held each element."""
    state: State
    """What the optimizer keeps on the server."""
    replies: Sequence[Reply]
    population: int
    """All clients there are, not only this round's."""


@dataclass(frozen=True)
class Optimizer:
    """Clients descend, the server takes their mean."""

    name: ClassVar[str] = ""
    keeps_state: ClassVar[bool] = False
    """Whether clients keep tensors between rounds."""
    anchors: ClassVar[bool] = False
    """Whether clients are held near the model they received."""
    uniform: ClassVar[bool] = False
    """Whether every client counts the same, whatever its number of examples."""

    def start(self, weights: Tensors) -> State:
        """Return the server's state before the first round; `weights` are the tensors that are trained."""
        return {}

    def broadcast(self, state: State) -> Tensors:
        """Return what goes down beside the model, in the server's space."""
        return {}

    def expected(self, down: Tensors) -> Tensors:
        """Return tensors like those that must come up beside the model, given what went down."""
        return {}

    def correct(self, parameters: Mapping[str, nn.Parameter], ctx: Context) -> None:
        """Change the gradients of a step in place."""

    def finish(self, shared: Tensors, ctx: Context) -> tuple[Tensors, Tensors]:
        """Return what goes up beside the model, and what the client keeps.

        `shared` is the upload as the server will decode it, so that both sides measure the same change.
        """
        return {}, {}

    def refuses(self, codec: Codec) -> str | None:
        """Return why this optimizer cannot go with a codec, or `None`."""
        return None

    def step(self, step: Step) -> tuple[Tensors, State]:
        """Return the server's new weights and state."""
        return step.mean, step.state


def is_held(held: Tensor | int, like: Tensor) -> Tensor:
    """Return a mask of the elements that at least one client held."""
    return held > 0 if isinstance(held, Tensor) else torch.full_like(like, held > 0, dtype=torch.bool)
