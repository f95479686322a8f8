"""FFA-LoRA: LoRA with A frozen at its random start."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedfactor.methods.lora import Lora, factor_names
from fedfactor.nn.frozen import freeze
from fedfactor.registry import register
from fedfactor.task import Build


@register("methods", "ffa_lora", paper="arXiv:2403.12313")
@dataclass(frozen=True)
class FFALora(Lora):
    """A keeps its random start, which all parties draw from the run's seed; only B is trained, sent and averaged.

    With a common A, the mean of the products B_k A is the product of the mean of B_k with A: the server's change is
    exactly the mean of the clients' changes.

    Deviations: none in the algorithm; the paper studies it with differential privacy, which is not part of it here.

    Use it where exact means matter, such as with noise or many local steps, or where LoRA's bytes should be halved.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start != "random":
            raise ValueError("ffa_lora draws A at random and never trains it: start must be 'random'")

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the model with A as part of the frozen base."""
        network = super().network(build, capacity)
        return freeze(network, factor_names(network, "v"))
