"""Rules that put the replies of a round together: the mean, or one that a few hostile clients cannot move far."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from fedfactor.protocol.method import Method
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.settings import Share, checked

Rule = Literal["mean", "norm_bound", "median", "trimmed_mean", "krum", "multi_krum"]


@checked
class Aggregation:
    """How the server puts the replies of a round together.

    `norm_bound` shortens changes that are longer than `bound` (Sun et al., arXiv:1911.07963, Sec. 3). `median` and
    `trimmed_mean` (Yin et al., arXiv:1803.01498, Def. 1 and 2) act on each element over the clients that hold it.
    `krum` takes the client whose change is nearest to those of others, `multi_krum` the mean of the nearest ones
    (Blanchard et al., NeurIPS 2017). All but `mean` and `norm_bound` give each client the same weight.
    """

    rule: Rule = "mean"
    """How replies are put together."""
    bound: Share | None = None
    """Largest 2-norm of the change that a client may send, for `norm_bound`."""
    hostile: Annotated[float, Field(ge=0, lt=0.5)] = 0.2
    """Largest share of hostile clients in a round that `trimmed_mean`, `krum` and `multi_krum` should withstand."""
    max_samples: Annotated[int, Field(ge=1)] | None = None
    """Largest number of examples that counts for a client's weight: clients say themselves how many they have."""
    strikes: Annotated[int, Field(ge=1)] | None = None
    """Invalid replies after which a client is left out for the rest of the run. Default: none is left out."""

    def __post_init__(self) -> None:
        if (self.rule == "norm_bound") != (self.bound is not None):
            raise ValueError("bound should be given with the rule norm_bound, and only with it")

    @property
    def gathers(self) -> bool:
        """Whether the rule needs all replies of a round at once."""
        return self.rule not in ("mean", "norm_bound")

    def cut(self, clients: int) -> int:
        """Return how many of some clients may be hostile."""
        return math.floor(self.hostile * clients)

    def refuses(self, method: Method, optimizer: Optimizer, cohort: int) -> str | None:
        """Return the reason why the rule cannot be combined with these, or `None`."""
        if self.rule == "mean":
            return None
        if method.traits.space != "slice":
            return f"aggregation.rule: {self.rule} needs fixed coordinates, which {method.name} does not have"
        if self.gathers and method.traits.moves_base:
            return f"aggregation.rule: {self.rule} has no mean whose error {method.name} could add to the base"
        if optimizer.keeps_state:
            return f"aggregation.rule: {self.rule} does not act on what clients of {optimizer.name} send beside weights"
        if self.rule in ("krum", "multi_krum"):
            if method.traits.adapts:
                return (
                    f"aggregation.rule: {self.rule} compares whole models, but clients of {method.name} may train parts"
                )
            if cohort < 2 * self.cut(cohort) + 3:
                return f"aggregation.rule: {self.rule} needs at least three clients more than twice the hostile ones"
        return None


MEAN = Aggregation()
"""The mean, as the methods define it."""
