"""FedRep: personal heads, trained before the shared body."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from fedfactor.methods.fedper import FedPer
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.method import Group, Phase, Traits, epochs_refused, parameter_names, split_epochs
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.settings import Training
from fedfactor.registry import described, register


@register("methods", "fedrep", paper="arXiv:2102.07078")
@dataclass(frozen=True)
class FedRep(FedPer):
    """The head stays on the client; in a round it is trained first, with the body fixed, then the body, with it fixed.

    Definition not re-read in the paper: it follows the authors' code. There all clients count the same (on CIFAR and
    MNIST), and head and body have epochs of their own, 10 and 1 or 10 and 5; here they share the round's epochs.

    Deviations: the authors train the heads of all clients for some more epochs after the last round.

    Use it like FedPer, where a head can be fitted well to features that stand still: it needs two epochs a round or
    more.
    """

    head_epochs: int | None = field(
        default=None, metadata=described("epochs of the head; not given: all but one, which is the body's")
    )

    @property
    def traits(self) -> Traits:
        """What others need to know about this method."""
        return Traits(weighting="uniform")

    def refuses(self, optimizer: Optimizer, codec: Codec, training: Training | None = None) -> str | None:
        """The epochs of a round must be enough for both phases."""
        return epochs_refused(self._split, training) or super().refuses(optimizer, codec, training)

    def _split(self, epochs: int) -> tuple[int, int]:
        return split_epochs("head_epochs", self.head_epochs, 1.0, epochs)

    def phases(self, network: nn.Module, epochs: int) -> list[Phase]:
        """First the head, then the body."""
        head, body = self._split(epochs)
        private = self.private_names(network)
        rest = [name for name in parameter_names(network) if name not in private]
        return [Phase(head, [Group(private)]), Phase(body, [Group(rest)])]
