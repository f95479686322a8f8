"""RoLoRA: rounds train B and A in turn."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Self

from torch import nn

from fedfactor.methods.lora import Lora, factor_names
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.method import Staged
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.settings import Training
from fedfactor.registry import described, register
from fedfactor.support.checks import check_choice
from fedfactor.task import Build


@register("methods", "rolora", paper="arXiv:2502.01755")
@dataclass(frozen=True)
class RoLora(Lora, Staged):
    """Odd rounds train B with a fixed A, even rounds train A with a fixed B; only what is trained is uploaded.

    In each round, all clients have the same fixed factor, so the server's change is exactly the mean of the clients'
    changes, and over the rounds both factors are learned.

    Deviations: the download has both factors, because a client may have missed rounds. In the paper, all clients take
    part in each round and receive what was trained last. Server optimizers with a state start anew in each round.

    Use it like FFA-LoRA, where a fixed random A is too weak.
    """

    trained: Literal["u", "v"] = field(default="u", metadata=described("factor of the first round: u is B, v is A"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("trained", self.trained, ("u", "v"))

    def refuses(self, optimizer: Optimizer, codec: Codec, training: Training | None = None) -> str | None:
        """Refuse tensors on the client that belong to the factor of one round."""
        stateful = [part.name for part in (optimizer, codec) if part.keeps_state]
        if stateful:
            return f"{stateful[0]} keeps tensors on the client, but {self.name} trains another factor in each round"
        return super().refuses(optimizer, codec, training)

    def at(self, round: int) -> Self:
        """Return the method with the factor that a round trains, counted from 0."""
        return self if round % 2 == 0 else replace(self, trained="v" if self.trained == "u" else "u")

    def convert(self, server: Tensors, before: nn.Module) -> Tensors:
        """Return the server's tensors as they are: all rounds have the same."""
        return server

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the model with one factor of each layer fixed."""
        network = super().network(build, capacity)
        for name in factor_names(network, "v" if self.trained == "u" else "u"):
            network.get_parameter(name).requires_grad_(False)
        return network
