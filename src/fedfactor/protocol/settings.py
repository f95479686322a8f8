"""The settings of a run that belong to no method, optimizer or codec.

Types, limits and defaults are stated once, in the annotations below, and hold for recipes and for Python alike: the
classes are pydantic dataclasses. Recipes, their JSON Schema and the errors read them from there.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field, replace
from typing import Annotated, Any, Literal, TypeVar, cast, dataclass_transform

import numpy as np
import torch
from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from fedfactor.protocol.local_optimizer import SHORT, LocalOptimizer
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
Kind = Literal["constant", "exponential", "multistep", "cosine", "one_cycle"]
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
    warmup: Count = 0
    """Rounds in which the learning rate rises linearly to its full value, before the schedule begins."""
    pct_start: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of the rounds in which the learning rate rises (one_cycle)."""
    div_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 25.0
    """The first learning rate is the full one divided by this (one_cycle)."""
    final_div_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1e4
    """The last learning rate is the first one divided by this (one_cycle)."""

    def __post_init__(self) -> None:
        if self.kind == "one_cycle" and self.warmup:
            raise ValueError("one_cycle has a warm-up of its own, pct_start: leave out warmup")

    def rate(self, lr: float, round: int, rounds: int) -> float:
        """Return the learning rate of a round, counted from 0."""
        if round < self.warmup:
            return lr * (round + 1) / (self.warmup + 1)
        if self.kind == "multistep":
            return lr * self.decay ** sum(round >= milestone for milestone in self.milestones)
        round, rounds = round - self.warmup, rounds - self.warmup
        if self.kind == "exponential":
            return lr * self.decay**round
        if self.kind == "cosine":
            return cosine(lr, self.floor, round, rounds)
        if self.kind == "one_cycle":
            first, top = lr / self.div_factor, self.pct_start * rounds - 1
            if round < top:
                return cosine(first, lr, round, top)
            return cosine(lr, first / self.final_div_factor, round - top, rounds - 1 - top)
        return lr


def cosine(start: float, end: float, step: float, steps: float) -> float:
    """Return the value at a step on the way from `start` to `end` along half a period of the cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * step / steps)) / 2


@checked
class Training:
    """How each client trains in a round, and on which device."""

    epochs: Count | Nonnegative | None = None
    """Local epochs per round, such as 2 or 0.5; default: 1."""
    local_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps of the optimizer per round, in place of `epochs`."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Examples per batch."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Batches per step: the step uses the mean of their gradients."""
    optimizer: LocalOptimizer | str = LocalOptimizer()
    """The optimizer of the clients' steps: its name, or a table with its name and options."""
    lr: Nonnegative | None = None
    """Learning rate of the clients; default: 0.1 for sgd, otherwise the default of the optimizer's class."""
    momentum: Annotated[float, Field(ge=0, le=1)] | None = None
    """Momentum of the clients' SGD; default: 0."""
    weight_decay: Nonnegative | None = None
    """Weight decay of the clients; default: that of the optimizer's class, which is 0.01 for adamw and 0 for sgd."""
    max_grad_norm: Nonnegative = 0.0
    """Gradients are clipped to this norm; 0: no clipping."""
    schedule: Schedule | Kind = Schedule()
    """How the learning rate changes over the rounds: a schedule, or the name of one that needs no other settings."""
    local_schedule: Literal["constant", "cosine"] = "constant"
    """How the learning rate changes over the steps of a round: not at all, or from the round's rate towards 0."""
    seed: int = 0
    """Seed of everything random except the partition, which has its own."""
    device: Annotated[str, AfterValidator(check_device_name)] = "cpu"
    """Device of torch on which clients train: cpu, cuda, cuda:1, mps, ..."""
    dtype: Dtype = "float32"
    """Data type of the weights."""
    precision: Literal["full", "bf16-mixed"] = "full"
    """Whether training computes in `dtype`, or in bfloat16 where torch's autocast finds it safe."""
    own_norms: bool = False
    """After a download, clients estimate the running statistics of batch norms on their own training data."""

    def __post_init__(self) -> None:
        settled: dict[str, Any] = {}
        if isinstance(self.schedule, str):
            settled["schedule"] = Schedule(self.schedule)
        if self.local_steps is None:
            settled["epochs"] = 1 if self.epochs is None else self.epochs
        elif self.epochs is not None:
            raise ValueError("epochs and local_steps both say how long a client trains in a round; give one of them")
        if self.precision != "full" and self.dtype != "float32":
            raise ValueError(f"precision {self.precision!r} needs dtype float32, got {self.dtype}")
        for key, value in {**settled, **self._settled_optimizer()}.items():
            object.__setattr__(self, key, value)

    def _settled_optimizer(self) -> dict[str, Any]:
        """Return the optimizer, and the settings that it shares with this class (`SHORT`), which have one value each.

        Raise ValueError if they contradict each other.
        """
        chosen = LocalOptimizer(self.optimizer) if isinstance(self.optimizer, str) else self.optimizer
        options, found = dict(chosen.options), dict[str, Any]()
        for key in SHORT:
            here, there = getattr(self, key), options.pop(key, None)
            if there is not None and not (isinstance(there, (int, float)) and there >= 0):
                raise ValueError(f"optimizer.{key} should be a number of at least 0, got {there!r}")
            if None not in (here, there) and here != there:
                raise ValueError(f"{key} and optimizer.{key} are the same setting; give one of them")
            found[key] = here if here is not None else there if there is not None else chosen.default(key)
            if found[key] and key not in chosen.parameters:
                raise ValueError(f"{key}: the optimizer {chosen.name} has none; leave it out")
        changes = self.schedule not in ("constant", Schedule()) or self.local_schedule != "constant"
        if changes and "lr" not in chosen.parameters:
            raise ValueError(f"schedule: the optimizer {chosen.name} has no learning rate that could change")
        if chosen.name == "sgd" and options["nesterov"] and (not found["momentum"] or options["dampening"]):
            raise ValueError("optimizer.nesterov needs a momentum above 0, and no dampening")
        if chosen.name == "sgd" and chosen.keep_state and not found["momentum"]:
            raise ValueError("optimizer.keep_state: sgd without momentum has no state to keep")
        return {**found, "optimizer": replace(chosen, options=options)}

    def rate(self, round: int, rounds: int) -> float:
        """Return the learning rate of a round, counted from 0."""
        assert isinstance(self.schedule, Schedule) and self.lr is not None  # __post_init__ has replaced them
        return self.schedule.rate(self.lr, round, rounds)

    def local_rate(self, rate: float, step: int, steps: int) -> float:
        """Return the learning rate of a step, counted from 0, in a round whose learning rate is `rate`."""
        return cosine(rate, 0.0, step, steps) if self.local_schedule == "cosine" else rate

    @property
    def local_optimizer(self) -> LocalOptimizer:
        """The optimizer of the clients' steps, as an object."""
        assert isinstance(self.optimizer, LocalOptimizer)  # __post_init__ has replaced a name
        return self.optimizer

    @property
    def looks_ahead(self) -> bool:
        """Whether the learning rate of a round depends on the total number of rounds."""
        assert isinstance(self.schedule, Schedule)
        return self.schedule.kind in ("cosine", "one_cycle")

    # How long a client trains.

    @property
    def length(self) -> float:
        """The length of a round's training: in steps if `local_steps` is given, otherwise in epochs."""
        found = self.epochs if self.local_steps is None else self.local_steps
        assert found is not None  # __post_init__ has replaced a missing number of epochs
        return found

    def batch_sizes(self, examples: int) -> list[int]:
        """Return the sizes of an epoch's batches. A last one of one example joins the previous: norms need two."""
        whole, rest = divmod(examples, self.batch_size)
        sizes = [self.batch_size] * whole + [rest] * bool(rest)
        return [*sizes[:-2], sum(sizes[-2:])] if len(sizes) > 1 and sizes[-1] == 1 else sizes

    def batches(self, examples: int, length: float) -> int:
        """Return the number of batches in training of a length (see `length`), the last, partial epoch rounded up."""
        if self.local_steps is not None:
            return round(length) * self.accumulate
        return math.ceil(round(length * len(self.batch_sizes(examples)), 9))  # 0.7 * 10 is more than 7

    def seen(self, examples: int, length: float) -> int:
        """Return how many examples a client with so many examples processes in training of a length."""
        sizes = self.batch_sizes(examples)
        epochs, rest = divmod(self.batches(examples, length), len(sizes))
        return epochs * examples + sum(sizes[:rest])

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which a client computes its loss."""
        if self.precision == "full":
            return nullcontext()
        return torch.autocast(self.torch_device.type, torch.bfloat16)

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
    target: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Value of the deciding metric for which the rounds, bytes and operations until it is reached are noted."""
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
