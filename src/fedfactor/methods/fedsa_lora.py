"""FedSA-LoRA: A is shared, B is private."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedfactor.methods.lora import Lora, factor_names
from fedfactor.registry import register


@register("methods", "fedsa_lora", paper="arXiv:2410.01463")
@dataclass(frozen=True)
class FedSALora(Lora):
    """A and B are trained together; A is averaged, and B stays on the client.

    The paper finds that the A of different clients are similar and learn general features, while B fits the client.

    Deviations: none in the algorithm. Tensors that `tune.train` lists, such as the classifier, are averaged.

    Use it where clients differ, with half of LoRA's bytes.
    """

    def private_names(self, network: nn.Module) -> set[str]:
        """Return the names of B in each layer."""
        return factor_names(network, "u")
