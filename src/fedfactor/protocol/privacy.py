"""User-level differential privacy: clipped updates and Gaussian noise, on the server or on the clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field

from fedfactor.protocol.method import Method
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.plan import Held, HoldersMean, Plan, Reply, Tensors, clip_factor, norm_of
from fedfactor.protocol.settings import Nonnegative, checked

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Inside = Annotated[float, Field(gt=0, lt=1)]

COUNTED_NOISE = 20
"""A cohort divided by this is the noise on the number of clients within an adaptive clip (Andrew et al., 2021)."""


@checked
class Privacy:
    """Differential privacy of whole clients: a client's update is clipped, and noise hides whether it took part."""

    clip: Positive | Literal["adaptive"]
    """Norm to which a client's whole update is clipped, or "adaptive": it follows a quantile of the norms."""
    delta: Inside
    """The delta at which epsilon is computed; choose it well below 1 / number of clients."""
    kind: Literal["gaussian"] = "gaussian"
    """The distribution of the noise."""
    noise: Nonnegative | None = None
    """Standard deviation of the noise on the sum of updates, as a multiple of the clip; 0: clipping only."""
    epsilon: Positive | None = None
    """Epsilon after all rounds, in place of `noise`: the noise is solved for."""
    where: Literal["server", "client"] = "server"
    """Who clips and adds noise: the server, to the sum, or each client, before its message leaves."""
    sampling: Literal["poisson", "fixed", "none"] | None = None
    """How cohorts are drawn and counted: each client on its own, a fixed number, or a fixed number that is not counted
    as protection. Default: poisson; none if clients add the noise."""
    budget: Positive | None = None
    """The run stops before the round in which epsilon would exceed this."""
    quantile: Inside = 0.5
    """Share of the clients whose updates an adaptive clip should leave as they are."""
    clip_start: Positive = 0.1
    """The adaptive clip of the first round."""
    clip_lr: Nonnegative = 0.2
    """Learning rate of the logarithm of the adaptive clip."""

    def __post_init__(self) -> None:
        local = self.where == "client"
        if (self.noise is None) == (self.epsilon is None):
            raise ValueError("give either noise, or epsilon, for which the noise is solved")
        if local and self.epsilon is not None:
            raise ValueError("clients that add the noise need its size: give noise; fedfactor plan solves for it")
        if local and self.clip == "adaptive":
            raise ValueError("an adaptive clip counts clients on the server: with where = client, give clip a number")
        if local and self.sampling in ("poisson", "fixed"):
            raise ValueError("the server sees who sends an update, so sampling protects nobody: set sampling = none")
        if self.sampling is None:
            object.__setattr__(self, "sampling", "none" if local else "poisson")

    @property
    def adaptive(self) -> bool:
        """Whether the clip follows a quantile of the clients' norms."""
        return self.clip == "adaptive"

    def first_clip(self) -> float:
        """Return the clip of the first round."""
        return self.clip_start if isinstance(self.clip, str) else self.clip

    def noise_on_sum(self, noise: float, cohort: int) -> float:
        """Return the noise on the sum of updates. Together with that on the number of clients, it protects as `noise`.

        Raise ValueError if the noise on the number of clients is not enough for this.
        """
        if not self.adaptive or not noise:
            return noise
        counted = 2 * cohort / COUNTED_NOISE
        if noise >= counted:
            raise ValueError(
                f"privacy.clip: with {cohort} clients per round, an adaptive clip needs noise below {counted:g}, got "
                f"{noise:g}; use larger cohorts, or give clip a number"
            )
        return 1 / math.sqrt(noise**-2 - counted**-2)

    def next_clip(self, clip: float, within: float) -> float:
        """Return the clip of the next round, given the share of clients whose norms were within this one."""
        return clip * math.exp(-self.clip_lr * (within - self.quantile))

    def refuses(self, method: Method, optimizer: Optimizer) -> str | None:
        """Return the reason why a combination would release more than clipped updates with noise, or `None`."""
        traits, name = method.traits, method.name
        if traits.space == "personal":
            return f"privacy: {name} keeps a model of each client on the server, which no noise covers"
        if traits.weighting not in ("samples", "uniform"):
            return f"privacy needs clients of equal weight, but {name} weights them by the {traits.weighting}"
        if traits.sends_labels:
            return f"privacy: clients of {name} tell the server which classes they have, which no noise covers"
        if traits.moves_base:
            return f"privacy: {name} moves the base by products of single clients' updates, which no noise covers"
        if traits.rereads:
            return f"privacy: {name} records figures of single replies, which no noise covers"
        if type(optimizer).expected is not Optimizer.expected:
            return f"privacy: clients of {optimizer.name} upload a second update (control variates) without noise"
        return None


def protected(shared: Tensors, down: Tensors, trained: frozenset[str], privacy: Privacy, seed: int) -> Tensors:
    """Return a client's upload with its change clipped and noise added; what is not trained stays as downloaded."""
    clip, std = privacy.first_clip(), (privacy.noise or 0.0) * privacy.first_clip()
    names, rng = sorted(shared.keys() & trained), torch.Generator().manual_seed(seed)
    changes = {name: shared[name] - down[name] for name in names}
    factor = clip_factor(norm_of(changes.values()), clip)
    found = {name: down[name].to(tensor.dtype) for name, tensor in shared.items()}
    for name, change in changes.items():
        noise = torch.randn(change.shape, generator=rng) * std
        found[name] = found[name] + change * factor + noise.to(change)
    return found


class PrivateFold:
    """A method's fold in which each client's change is clipped, and noise is added to the sum.

    Only trained weights take part; the server keeps its buffers. Sums are divided by the expected number of holders of
    each element, which is public, and not by the number of replies.
    """

    def __init__(
        self,
        fold: HoldersMean,
        trained: Callable[[float], frozenset[str]],
        plans: Mapping[float, Plan],
        holders: Mapping[float, float],
        clip: float,
    ) -> None:
        """Take what clients of each capacity hold, and how many of them are expected in a round."""
        self._fold, self._trained, self._clip = fold, trained, clip
        self.within = 0
        """The number of clients whose norms were at most the clip."""
        self.replies = 0
        for capacity, plan in plans.items():
            seen = {name: piece for name, piece in plan.items() if name in trained(capacity)}
            for piece in fold.places(seen, capacity):
                fold.sum_of(piece.source).count(piece, holders[capacity], holders[capacity])

    def add(self, reply: Reply) -> None:
        """Add the clipped change of a reply."""
        trained = self._trained(reply.capacity)
        weights = {name: tensor for name, tensor in reply.tensors.items() if name in trained}
        changes = list(self._fold.changes(replace(reply, tensors=weights)))
        norm = norm_of(change for _, change in changes)
        factor = clip_factor(norm, self._clip)
        self.within, self.replies = self.within + (norm <= self._clip), self.replies + 1
        for piece, change in changes:
            total = self._fold.sum_of(piece.source).change
            piece.add(total, change.to(total.dtype) * factor)

    def add_noise(self, std: float, rng: torch.Generator) -> None:
        """Add noise to the sums of all elements that some client can hold. Call it once, before `result`."""
        for total in self._fold.sums():
            total.change.add_(torch.randn(total.change.shape, generator=rng).to(total.change) * std * total.reached)

    def result(self) -> tuple[Tensors, Held]:
        """Return the mean, and the expected number of holders of each element."""
        return self._fold.result()
