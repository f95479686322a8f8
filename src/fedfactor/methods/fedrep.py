"""FedRep: personal heads, trained before the shared body."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fedfactor.methods.fedper import FedPer
from fedfactor.protocol.method import Phase, split_epochs
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
    weighting: ClassVar[str] = "uniform"

    def phases(self, epochs: int) -> list[Phase]:
        """First the head, then the body."""
        head, body = split_epochs("head_epochs", self.head_epochs, 1.0, epochs)
        return [Phase(head, self.private), Phase(body, lambda name: not self.private(name))]
