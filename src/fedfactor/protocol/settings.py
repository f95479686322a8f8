"""The settings of a run that belong to no method, optimizer or codec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from fedfactor.checks import check_choice, check_number
from fedfactor.rng import numpy_rng

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def check_device_name(name: str) -> None:
    """Raise a sentence unless torch knows a device of this name, here or elsewhere."""
    try:
        known = torch.device(name).type != "meta"
    except RuntimeError:
        known = False
    if not known:
        raise ValueError(f"device must be cpu, cuda, cuda:1, mps, xpu or another that torch has, got {name!r}")


def check_device_here(name: str) -> None:
    """Raise a sentence unless this machine can compute on a device."""
    try:
        torch.empty(1, device=name)
    except Exception as error:  # torch raises many kinds, by device
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(f"device {name!r} cannot be used here ({reason}); cpu always can") from None


Kind = Literal["constant", "exponential", "multistep", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes over rounds."""

    kind: Kind = "constant"
    decay: float = 1.0
    """Factor a round (exponential) or a milestone (multistep)."""
    milestones: tuple[int, ...] = ()
    """Rounds, counted from 0, from which the next factor applies."""
    floor: float = 0.0
    """Where the cosine ends."""

    def __post_init__(self) -> None:
        check_choice("schedule", self.kind, ("constant", "exponential", "multistep", "cosine"))
        for name in ("decay", "floor"):
            check_number(name, getattr(self, name), 0)
        for milestone in self.milestones:
            check_number("milestones", milestone, 0, whole=True)

    def rate(self, lr: float, round: int, rounds: int) -> float:
        """Return the learning rate of a round, counted from 0."""
        if self.kind == "exponential":
            return lr * self.decay**round
        if self.kind == "multistep":
            return lr * self.decay ** sum(round >= milestone for milestone in self.milestones)
        if self.kind == "cosine":
            return self.floor + (lr - self.floor) * (1 + math.cos(math.pi * round / rounds)) / 2
        return lr


@dataclass(frozen=True)
class Training:
    """What every client does in a round, and where."""

    epochs: int = 1
    batch_size: int = 32
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    """Largest norm of a gradient; 0: no clipping."""
    schedule: Schedule | Kind = Schedule()
    """A schedule, or the name of one that needs no settings."""
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_number("epochs", self.epochs, 0, whole=True)
        check_number("batch_size", self.batch_size, 1, whole=True)
        check_number("seed", self.seed, -math.inf, whole=True)
        check_number("momentum", self.momentum, 0, 1)
        for name in ("lr", "weight_decay", "max_grad_norm"):
            check_number(name, getattr(self, name), 0)
        check_choice("dtype", self.dtype, DTYPES)
        check_device_name(self.device)
        if isinstance(self.schedule, str):
            object.__setattr__(self, "schedule", Schedule(self.schedule))

    def rate(self, round: int, rounds: int) -> float:
        """Return the learning rate of a round, counted from 0."""
        assert isinstance(self.schedule, Schedule)  # names were replaced when this was made
        return self.schedule.rate(self.lr, round, rounds)

    @property
    def torch_device(self) -> torch.device:
        """The device as torch knows it."""
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The training type as torch knows it."""
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Capacities:
    """Which share of the full model each client can take: levels, how many clients have each, fixed or redrawn."""

    shares: Mapping[float, float] = field(default_factory=lambda: {1.0: 1.0})
    """From a level in (0, 1] to the share of clients that have it."""
    dynamic: bool = False
    """Redrawn for every client in every round."""

    def __post_init__(self) -> None:
        if not isinstance(self.shares, Mapping):
            raise ValueError(
                f"capacities are levels with their shares, such as {{1.0: 0.5, 0.5: 0.5}}, got {self.shares!r}"
            )
        if not self.shares or any(not 0 < level <= 1 for level in self.shares):
            raise ValueError(f"capacities must lie in (0, 1], got {list(self.shares)}")
        if any(share <= 0 for share in self.shares.values()):
            raise ValueError(f"shares of capacities must be positive, got {list(self.shares.values())}")

    @property
    def levels(self) -> list[float]:
        """All levels, largest first."""
        return sorted(self.shares, reverse=True)

    def assign(self, seed: int, population: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Give every client a level (its position in `levels`) so that the shares hold exactly, in seeded order."""
        share = np.array([self.shares[level] for level in self.levels])
        edges = np.rint(np.cumsum(share) / share.sum() * population).astype(np.int64)
        blocks = np.repeat(np.arange(len(edges)), np.diff(edges, prepend=0))
        return numpy_rng(seed, "capacity").permutation(blocks)

    def redraw(self, seed: int, round: int, client: int) -> float:
        """Draw a client's level for one round."""
        share = np.array([self.shares[level] for level in self.levels])
        return self.levels[int(numpy_rng(seed, "capacity", round, client).choice(len(share), p=share / share.sum()))]


@dataclass(frozen=True)
class Reported(Capacities):
    """Capacities of which some clients' are known: the largest level that each can take."""

    given: Mapping[int, float] = field(default_factory=dict)

    def assign(self, seed: int, population: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Give every other client a level as without them."""
        found = super().assign(seed, population)
        for client, most in self.given.items():
            fitting = [place for place, level in enumerate(self.levels) if level <= most]
            found[client] = fitting[0] if fitting else len(self.levels) - 1
        return found


@dataclass(frozen=True)
class Rounds:
    """How many rounds there are, who takes part, what is measured, and when a run gives up."""

    rounds: int = 10
    cohort: int | float = 1.0
    """Clients a round: a number, or a share of the population."""
    quorum: float = 0.5
    """Least share of a cohort that must answer well; below it the run stops."""
    evaluate_every: int = 1
    """Rounds between evaluations; the last round is always evaluated. 0: only the last."""
    evaluate_clients: Literal["none", "selected", "all"] = "selected"
    """Whose own test data personal models are measured on."""
    evaluate_limit: int = 0
    """Most clients that stand for all, in measuring and in gathering norm statistics: always the same. 0: all do."""
    target: float | None = None
    """Accuracy at which rounds, bytes and operations are noted."""
    joules_per_byte: float | None = None
    """Energy of the link; there is no default, since no paper prints one."""

    def __post_init__(self) -> None:
        check_number("rounds", self.rounds, 0, whole=True)
        check_number("evaluate_every", self.evaluate_every, 0, whole=True)
        check_number("evaluate_limit", self.evaluate_limit, 0, whole=True)
        check_choice("evaluate_clients", self.evaluate_clients, ("none", "selected", "all"))
        if isinstance(self.cohort, float) and not 0 < self.cohort <= 1:
            raise ValueError(f"a cohort given as a share must lie in (0, 1], got {self.cohort:g}")
        if isinstance(self.cohort, int) and self.cohort < 1:
            raise ValueError(f"a cohort must have at least one client, got {self.cohort}")
        if self.target is not None:
            check_number("target", self.target, 0, 1)
        if self.joules_per_byte is not None:
            check_number("joules_per_byte", self.joules_per_byte, 0)
        if not 0 < self.quorum <= 1:
            raise ValueError(f"quorum must lie in (0, 1], got {self.quorum:g}")

    def due(self, round: int) -> bool:
        """Return whether a round, counted from 1, is evaluated."""
        return round == self.rounds or (self.evaluate_every > 0 and round % self.evaluate_every == 0)

    def cohort_of(self, seed: int, round: int, population: int) -> list[int]:
        """Draw the clients of a round; the same for every method."""
        drawn = numpy_rng(seed, "cohort", round).choice(population, size=self.cohort_size(population), replace=False)
        return [int(client) for client in drawn]

    def measured(self, seed: int, population: int) -> list[int]:
        """Return the clients that stand for all when something is measured on everybody, in ascending order."""
        if not 0 < self.evaluate_limit < population:
            return list(range(population))
        drawn = numpy_rng(seed, "measured").choice(population, size=self.evaluate_limit, replace=False)
        return sorted(int(client) for client in drawn)

    def cohort_size(self, population: int) -> int:
        """Return how many clients take part in a round."""
        size = self.cohort if isinstance(self.cohort, int) else max(1, round_half_up(self.cohort * population))
        if size > population:
            raise ValueError(f"a cohort of {size} cannot be drawn from {population} clients")
        return size


def round_half_up(value: float) -> int:
    """Round to the nearest whole number, halves up."""
    return math.floor(value + 0.5)
