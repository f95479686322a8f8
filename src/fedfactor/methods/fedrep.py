"""FedRep: personal heads, trained before the shared body."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from fedfactor.methods.fedper import FedPer
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.method import ParameterGroup, Phase, Traits, epochs_refused, parameter_names, split_epochs
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.settings import Training
from fedfactor.registry import described, register


@register("methods", "fedrep", paper="arXiv:2102.07078")
@dataclass(frozen=True)
class FedRep(FedPer):
    """The head stays on the client; in a round the head is trained first with a frozen body, then the body.

    Follows the authors' code, where all clients have equal weight in the mean (on CIFAR and MNIST).

    Deviations: in the code, head and body have their own numbers of epochs, 10 and 1 or 10 and 5. Here they share the
    epochs of a round. The code also trains the heads of all clients for more epochs after the last round.

    Use it like FedPer, where a head is fitted better to features that do not change meanwhile. It needs at least two
    epochs per round.
    """

    head_epochs: int | None = field(
        default=None, metadata=described("epochs for the head; default: all but one, which trains the body")
    )

    @property
    def traits(self) -> Traits:
        """All clients have equal weight in the mean."""
        return Traits(weighting="uniform")

    def refuses(self, optimizer: Optimizer, codec: Codec, training: Training | None = None) -> str | None:
        """Refuse rounds with too few epochs for both phases."""
        return epochs_refused(self._split, training) or super().refuses(optimizer, codec, training)

    def _split(self, epochs: float) -> tuple[float, float]:
        return split_epochs("head_epochs", self.head_epochs, 1.0, epochs)

    def phases(self, network: nn.Module, epochs: float) -> list[Phase]:
        """Train the head first, then the body."""
        head, body = self._split(epochs)
        private = self.private_names(network)
        rest = [name for name in parameter_names(network) if name not in private]
        return [Phase(head, [ParameterGroup(private)]), Phase(body, [ParameterGroup(rest)])]
