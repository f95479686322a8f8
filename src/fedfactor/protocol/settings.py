"""The settings of a run that belong to no method, optimizer or codec.

Types, limits and defaults are stated once, in the annotations below, and hold for recipes and for Python alike: the
classes are pydantic dataclasses. Recipes, their JSON Schema and the errors read them from there.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar, cast, dataclass_transform

import numpy as np
import torch
from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from fedfactor.protocol.sentences import sentence
from fedfactor.rng import numpy_rng
from fedfactor.task import EVALUATION_BATCH

CONFIG = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
"""Unknown names are refused, values are not converted, and the text below a field describes it."""

Settings = TypeVar("Settings")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def checked(cls: type[Settings]) -> type[Settings]:
    """Make a frozen dataclass that raises ValueError, in one sentence, if an argument is not what its field says."""
    made: Any = dataclass(frozen=True, config=CONFIG)(cls)
    validate, signature = made.__init__, inspect.signature(made)

    @functools.wraps(validate)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        try:
            validate(self, **given)
        except ValidationError as error:
            raise ValueError(f"{cls.__name__}: {sentence(error, given, made.__pydantic_fields__)}") from None

    made.__init__ = init
    return cast(type[Settings], made)


Count = Annotated[int, Field(ge=0)]
Nonnegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Level = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Kind = Literal["constant", "exponential", "multistep", "cosine"]
Dtype = Literal["float32", "float64", "bfloat16"]


def check_device_name(name: str) -> str:
    """Return the name of a device. Raise ValueError if no build of torch has such a device."""
    try:
        known = torch.device(name).type != "meta"
    except RuntimeError:
        known = False
    if not known:
        raise ValueError("must be cpu, cuda, cuda:1, mps, xpu or another device of torch")
    return name


def check_device_here(name: str) -> None:
    """Raise ValueError if this machine cannot compute on a device."""
    try:
        torch.empty(1, device=name)
    except Exception as error:  # torch raises many types, depending on the device
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(f"device {name!r} cannot be used here ({reason}); cpu always can") from None


@checked
class Schedule:
    """How the learning rate changes over the rounds."""

    kind: Kind = "constant"
    """The shape of the curve."""
    decay: Nonnegative = 1.0
    """Factor per round (exponential) or per milestone (multistep)."""
    milestones: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Rounds, counted from 0, at which the learning rate is multiplied by `decay` (multistep)."""
    floor: Nonnegative = 0.0
    """Learning rate at the end (cosine)."""

    def rate(self, lr: float, round: int, rounds: int) -> float:
        """Return the learning rate of a round, counted from 0."""
        if self.kind == "exponential":
            return lr * self.decay**round
        if self.kind == "multistep":
            return lr * self.decay ** sum(round >= milestone for milestone in self.milestones)
        if self.kind == "cosine":
            return self.floor + (lr - self.floor) * (1 + math.cos(math.pi * round / rounds)) / 2
        return lr


@checked
class Training:
    """How each client trains in a round, and on which device."""

    epochs: Count = 1
    """Local epochs per round."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Examples per batch."""
    lr: Nonnegative = 0.1
    """Learning rate of the clients' SGD."""
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Momentum of the clients' SGD."""
    weight_decay: Nonnegative = 0.0
    """Weight decay of the clients' SGD."""
    max_grad_norm: Nonnegative = 0.0
    """Gradients are clipped to this norm; 0: no clipping."""
    schedule: Schedule | Kind = Schedule()
    """How the learning rate changes over the rounds: a schedule, or the name of one that needs no other settings."""
    seed: int = 0
    """Seed of everything random except the partition, which has its own."""
    device: Annotated[str, AfterValidator(check_device_name)] = "cpu"
    """Device of torch on which clients train: cpu, cuda, cuda:1, mps, ..."""
    dtype: Dtype = "float32"
    """Data type of the weights."""
    own_norms: bool = False
    """After a download, clients estimate the running statistics of batch norms on their own training data."""

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str):
            object.__setattr__(self, "schedule", Schedule(self.schedule))

    def rate(self, round: int, rounds: int) -> float:
        """Return the learning rate of a round, counted from 0."""
        assert isinstance(self.schedule, Schedule)  # __post_init__ has replaced a name
        return self.schedule.rate(self.lr, round, rounds)

    @property
    def looks_ahead(self) -> bool:
        """Whether the learning rate of a round depends on the total number of rounds."""
        assert isinstance(self.schedule, Schedule)
        return self.schedule.kind == "cosine"

    @property
    def torch_device(self) -> torch.device:
        """The device as torch knows it."""
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The data type as torch knows it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@checked
class Capacities:
    """Which share of the full model each client can train."""

    shares: Annotated[Mapping[Level, Share], Field(min_length=1)] = field(default_factory=lambda: {1.0: 1.0})
    """The share of clients that have each level; a level is a capacity in (0, 1]."""
    dynamic: bool = False
    """Whether each client draws its capacity anew in each round."""
    cover: bool = False
    """Whether capacities are drawn again until each level occurs among the clients of the round (needs `dynamic`)."""

    def __post_init__(self) -> None:
        if self.cover and not self.dynamic:
            raise ValueError("cover draws capacities again, so it needs dynamic = true")

    @property
    def levels(self) -> list[float]:
        """All levels, largest first."""
        return sorted(self.shares, reverse=True)

    def assign(self, seed: int, population: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Give each client a level (its index in `levels`) in seeded order, so that the shares hold exactly."""
        share = np.array([self.shares[level] for level in self.levels])
        edges = np.rint(np.cumsum(share) / share.sum() * population).astype(np.int64)
        blocks = np.repeat(np.arange(len(edges)), np.diff(edges, prepend=0))
        return numpy_rng(seed, "capacity").permutation(blocks)

    def redraw(self, seed: int, round: int, client: int, attempt: int = 0) -> float:
        """Draw a client's level for one round; see `covering_attempt`."""
        share = np.array([self.shares[level] for level in self.levels])
        rng = numpy_rng(seed, f"capacity {attempt}" if attempt else "capacity", round, client)
        return self.levels[int(rng.choice(len(share), p=share / share.sum()))]

    def covering_attempt(self, seed: int, round: int, cohort: Collection[int]) -> int:
        """Return the number of the first draw, counted from 0, in which the cohort has each level."""
        if not self.cover:
            return 0
        for attempt in range(MOST_DRAWS if len(cohort) >= len(self.levels) else 0):
            if {self.redraw(seed, round, client, attempt) for client in cohort} == {*self.levels}:
                return attempt
        raise ValueError(
            f"capacities.cover: {len(cohort)} clients per round cannot have each of the {len(self.levels)} levels, or "
            f"do so less than once in {MOST_DRAWS:,} draws; use more clients per round, or larger shares"
        )


MOST_DRAWS = 1000


@checked
class Reported(Capacities):
    """Capacities where some clients have reported the largest capacity they can train."""

    given: Mapping[int, float] = field(default_factory=dict)

    def assign(self, seed: int, population: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Give clients that reported the largest level they can train, and the others a level as without reports."""
        found = super().assign(seed, population)
        for client, most in self.given.items():
            fitting = [place for place, level in enumerate(self.levels) if level <= most]
            found[client] = fitting[0] if fitting else len(self.levels) - 1
        return found


MOST_EVALUATIONS = 20
"""Number of rounds that are evaluated at most if `evaluate_every` is not given."""


@checked
class Rounds:
    """How many rounds there are, who takes part, what is measured, and when a run stops."""

    rounds: Count = 10
    """Number of rounds."""
    cohort: Annotated[int, Field(ge=1)] | Level = 1.0
    """Clients per round: a whole number, or a share of the population such as 0.1."""
    quorum: Level = 0.5
    """Smallest share of a cohort that must answer with a valid update; below it the run stops."""
    evaluate_every: Count | None = None
    """Rounds between evaluations. The last round is always evaluated; 0: only the last. Default: at most 20 per run."""
    evaluate_clients: Literal["none", "selected", "all"] = "selected"
    """Whose personal models are measured, each on the client's own test data."""
    evaluate_limit: Count = 0
    """Evaluate, and gather norm statistics from, at most this many clients, always the same ones; 0: all clients."""
    evaluate_batch_size: Annotated[int, Field(ge=1)] = EVALUATION_BATCH
    """Examples per batch in evaluations. Scores depend on it only if a network uses statistics of its batch."""
    target: Annotated[float, Field(ge=0, le=1)] | None = None
    """Accuracy for which the rounds, bytes and operations until it is reached are noted."""
    joules_per_byte: Nonnegative | None = None
    """Energy that the link needs per byte. It has no default because no paper prints one."""

    def __post_init__(self) -> None:
        if self.evaluate_every is None:
            object.__setattr__(self, "evaluate_every", max(1, math.ceil(self.rounds / MOST_EVALUATIONS)))

    def due(self, round: int) -> bool:
        """Return whether a round, counted from 1, is evaluated."""
        return round == self.rounds or bool(self.evaluate_every and round % self.evaluate_every == 0)

    def cohort_of(self, seed: int, round: int, population: int) -> list[int]:
        """Draw the clients of a round; the same for each method."""
        drawn = numpy_rng(seed, "cohort", round).choice(population, size=self.cohort_size(population), replace=False)
        return [int(client) for client in drawn]

    def measured(self, seed: int, population: int) -> list[int]:
        """Return the clients that are measured when all are to be, in ascending order: see `evaluate_limit`."""
        if not 0 < self.evaluate_limit < population:
            return list(range(population))
        drawn = numpy_rng(seed, "measured").choice(population, size=self.evaluate_limit, replace=False)
        return sorted(int(client) for client in drawn)

    def cohort_size(self, population: int) -> int:
        """Return how many clients take part in a round. Raise ValueError if the population is smaller."""
        size = self.cohort if isinstance(self.cohort, int) else max(1, round_half_up(self.cohort * population))
        if size > population:
            raise ValueError(f"a cohort of {size} cannot be drawn from {population} clients")
        return size


def round_half_up(value: float) -> int:
    """Round to the nearest whole number, halves up."""
    return math.floor(value + 0.5)
