"""Which noise an epsilon needs, by the number of clients per round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedfactor.advise.devices import PlanError
from fedfactor.protocol.settings import Rounds
from fedfactor.runs.text import SPARE, plain
from fedfactor.server.accounting import Release

COHORTS = (0.01, 0.1, 1.0)
"""Shares of the clients that are tried if no cohorts are given."""


@dataclass(frozen=True)
class NoisePlan:
    """The noise with which cohorts of a size stay within an epsilon, as multiples of the clip."""

    cohort: int
    noise: float
    """On the sum of the updates: the value of `privacy.noise`."""
    per_number: float
    """On each number of the mean."""
    norm: float
    """The expected norm of the noise on the mean of a dense model. A clipped update has a norm of at most 1."""


@dataclass(frozen=True)
class PrivacyPlan:
    """The noise that an epsilon needs."""

    epsilon: float
    delta: float
    clients: int
    rounds: int
    rows: tuple[NoisePlan, ...]


def check_guarantee(epsilon: float, delta: float | None, clients: int) -> float:
    """Return delta. Raise PlanError if it is missing or too large, or epsilon is not above 0."""
    if epsilon <= 0:
        raise PlanError(f"--epsilon must be above 0, got {epsilon:g}")
    if delta is None or not 0 < delta < 1 / clients:
        raise PlanError(f"--epsilon needs a --delta above 0 and below 1 / {clients:,}, the number of --clients")
    return delta


def plan_privacy(
    epsilon: float, delta: float, clients: int, rounds: int, cohorts: Sequence[float], parameters: int
) -> PrivacyPlan:
    """Solve for the noise of each cohort, drawn by Poisson sampling, over all rounds; one of at most 1 is a share."""
    rows = []
    for given in cohorts or COHORTS:
        size = Rounds(cohort=given if given <= 1 else int(given)).cohort_size(clients)
        noise = Release("poisson", size, clients).solved(epsilon, delta, rounds)
        rows.append(NoisePlan(size, noise, noise / size, noise * math.sqrt(parameters) / size))
    return PrivacyPlan(epsilon, delta, clients, rounds, tuple(rows))


def render_privacy(found: PrivacyPlan) -> RenderableType:
    """Return the table for a terminal."""
    title = f"epsilon {found.epsilon:g} at delta {found.delta:g}: {found.rounds:,} rounds, {found.clients:,} clients"
    table = Table(title=title, **SPARE)
    for head in (
        "clients\nper round",
        "privacy.\nnoise",
        "noise on each\nnumber / clip",
        "norm of noise\n/ clip, dense",
    ):
        table.add_column(head, justify="right")
    for row in found.rows:
        table.add_row(f"{row.cohort:,}", f"{row.noise:g}", plain(row.per_number), plain(row.norm))
    enough = next((row for row in found.rows if row.norm <= 1), None)
    words = (
        f"From {enough.cohort:,} clients per round on, the noise is smaller than a clipped update of the dense model."
        if enough
        else "With all of these cohorts, the noise is larger than a clipped update of the dense model: use more "
        "clients per round, fewer rounds, or a method that sends fewer numbers."
    )
    note = "The norm grows with the square root of the numbers that a method sends; private ones get no noise. "
    return Group(Text(), table, Text(note + words, style="dim"))
