"""Differential privacy of a run on the server: cohorts, noise, the clip of each round, and what is spent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from fedfactor.nn.norms import batch_norms
from fedfactor.protocol.fleet import Fleet
from fedfactor.protocol.method import Fold, Participant, shared_names
from fedfactor.protocol.plan import HoldersMean, Plan, Tensors
from fedfactor.protocol.privacy import COUNTED_NOISE, Privacy, PrivateFold
from fedfactor.protocol.settings import Capacities, Rounds
from fedfactor.protocol.setup import Setup
from fedfactor.rng import numpy_rng, torch_rng
from fedfactor.server.accounting import Release, Spending


class Protection:
    """Clips and adds noise to the rounds of a run, and counts what they spend."""

    def __init__(
        self, privacy: Privacy, setup: Setup, rounds: Rounds, capacities: Capacities, secret: int | None = None
    ) -> None:
        """Take the run's settings. Cohorts and noise come from the `secret` seed; without one, from the run's seed."""
        self.settings, self.setup, self.rounds, self._capacities = privacy, setup, rounds, capacities
        self._secret, self.seed = secret is not None, setup.training.seed if secret is None else secret
        self._population = setup.task.data.clients
        self.cohort = rounds.cohort_size(self._population)
        if privacy.delta >= 1 / self._population:
            raise ValueError(
                f"privacy.delta must be below 1 / {self._population}, the number of clients, got {privacy.delta:g}: a "
                "larger one would allow all data of a client to be released"
            )
        release = Release.of(privacy, self.cohort, self._population)
        noise = privacy.noise
        if noise is None:
            assert privacy.epsilon is not None
            noise = release.solved(privacy.epsilon, privacy.delta, rounds.rounds)
        self.noise, self.on_sum = noise, privacy.noise_on_sum(noise, self.cohort)
        self._spending = Spending(release, noise, privacy.delta)
        self.last_round = self._spending.rounds_within(privacy.budget, rounds.rounds) if self._shared else rounds.rounds
        """The last round that fits the budget."""
        if self.last_round == 0 < rounds.rounds:
            raise ValueError(
                f"privacy.budget: the first round spends an epsilon of {self._spending.after(1):.4g}, more than "
                f"{privacy.budget:g}; use more noise, or a larger budget"
            )

    @property
    def _shared(self) -> int:
        """The number of trained numbers that clients send."""
        return self._counted()[0]

    def _counted(self) -> tuple[int, int]:
        """Return how many trained numbers of the largest network are sent, and how many stay on the client."""
        network, method = self.setup.network(1.0), self.setup.method
        trained = {name: p.numel() for name, p in network.named_parameters() if p.requires_grad}
        shared = sum(trained[name] for name in shared_names(method, network) if name in trained)
        return shared, sum(trained.values()) - shared

    @property
    def identity(self) -> str:
        """The settings that must not change when a run is resumed: all except the budget, with the noise solved for."""
        seed = "a secret seed" if self._secret else "the run's seed"
        return f"{replace(self.settings, budget=None)}, noise {self.noise:g} from {seed}"

    def described(self) -> dict[str, Any]:
        """Return what a report says about the run's privacy, for the run's first event."""
        shared, private = self._counted()
        given = {key: value for key, value in asdict(self.settings).items() if value is not None}
        return {
            **given,
            "noise": self.noise,
            "neighbours": self._spending.release.neighbours,
            "cohort": self.cohort,
            "population": self._population,
            "shared": shared,
            "private": private,
            "seed": "secret" if self._secret else "run",
        }

    def cohort_of(self, round: int) -> list[int]:
        """Draw the clients of a round."""
        if self.settings.sampling != "poisson":
            return self.rounds.cohort_of(self.seed, round, self._population)
        drawn = numpy_rng(self.seed, "cohort", round).random(self._population) < self.cohort / self._population
        return [int(client) for client in np.flatnonzero(drawn)]

    def round(self, view: Tensors, round: int, events: list[dict[str, Any]]) -> ProtectedRound:
        """Return what protects a round, given the method's view of the server and the run's events so far."""
        last: Mapping[str, Any] = events[-1].get("privacy", {}) if events and events[-1]["event"] == "round" else {}
        setup, levels = self.setup.at(round), self._capacities.levels
        # Any generator will do: the positions of changes do not depend on what is drawn.
        plans = {
            level: setup.method.plan(view, Participant(-1, level, round), setup.network(level), torch.Generator())
            for level in levels
        }
        return ProtectedRound(self, round, float(last.get("next_clip", self.settings.first_clip())), plans)

    def expected(self) -> dict[float, float]:
        """Return the expected number of clients of each capacity in a round, which is public."""
        levels, shares = self._capacities.levels, self._capacities.shares
        if self._capacities.dynamic:
            counts = [shares[level] / sum(shares.values()) * self._population for level in levels]
        else:
            assigned = self._capacities.assign(self.setup.training.seed, self._population)
            counts = np.bincount(assigned, minlength=len(levels)).tolist()
        return {level: count * self.cohort / self._population for level, count in zip(levels, counts, strict=True)}

    def epsilon(self, rounds: int) -> float | None:
        """Return the epsilon after some rounds: 0 if nothing trained is sent; `None` if there is no noise."""
        found = self._spending.after(rounds) if self._shared else 0.0
        return found if math.isfinite(found) else None


@dataclass(frozen=True)
class ProtectedRound:
    """Clips the changes of a round's replies, and adds noise to their sum."""

    protection: Protection
    number: int
    """Counted from 0."""
    clip: float
    plans: Mapping[float, Plan]
    """What clients of each capacity hold."""

    def fold(self, fold: Fold) -> Fold:
        """Return a method's fold with clipping; the fold itself if clients clip and add noise."""
        setup, own = self.protection.setup.at(self.number), type(fold)
        if self.protection.settings.where == "client":
            return fold
        if not isinstance(fold, HoldersMean) or (
            type(fold).add is not HoldersMean.add and type(fold).changes is HoldersMean.changes  # `add` is not called
        ):
            raise ValueError(
                f"privacy: the fold of {setup.method.name}, {own.__name__}, does not say which changes it sums: "
                "derive it from HoldersMean, and if it replaces `add`, give it `changes` and `places` too"
            )
        return PrivateFold(fold, setup.trained, self.plans, self.protection.expected(), self.clip)

    def finish(self, fold: Fold) -> dict[str, Any]:
        """Add the round's noise to its sums; return what the round's event says about privacy."""
        run, settings = self.protection, self.protection.settings
        found: dict[str, Any] = {"epsilon": run.epsilon(self.number + 1), "clip": self.clip}
        if isinstance(fold, PrivateFold):
            rng = torch_rng(run.seed, "privacy", self.number)
            fold.add_noise(run.on_sum * self.clip, rng)
            if settings.adaptive:
                # Halves are subtracted, so that a client changes the sum by a half at most.
                noise = float(torch.randn((), generator=rng, dtype=torch.float64)) * run.cohort / COUNTED_NOISE
                counted = fold.within - fold.replies / 2 + (noise if run.noise else 0.0)
                found["within"] = counted / run.cohort + 0.5
                found["next_clip"] = settings.next_clip(self.clip, found["within"])
        if self.number + 1 == run.last_round < run.rounds.rounds:
            found["stopped"] = f"the next round would exceed the budget of {settings.budget:g}"
        return found


def check_private(setup: Setup, rounds: Rounds, capacities: Capacities, fleet: Fleet | None, deployed: bool) -> None:
    """Raise ValueError if a run with privacy would release more about its clients than updates with noise."""
    assert setup.privacy is not None
    reason = setup.privacy.refuses(setup.method, setup.optimizer)
    network = setup.network(1.0)
    tracking = [name for name, norm in batch_norms(network).items() if norm.track_running_stats]
    shared = {*shared_names(setup.method, network)}
    sent = [name for name in tracking if f"{name}.running_mean" in shared]
    if setup.method.traits.calibrates and batch_norms(network):
        reason = reason or (
            f"privacy: {setup.method.name} estimates norm statistics on the clients' data, which no noise covers; "
            "use a model with group norms, or switch static_norm off"
        )
    if sent:
        reason = reason or (
            f"privacy: the running statistics of batch norms ({sent[0]}) are computed from clients' data and would be "
            "sent without noise; use a model with group norms, or a method such as fedbn, which keeps them private"
        )
    if rounds.evaluate_clients == "selected":
        reason = reason or (
            "privacy: clients send their update only, and no scores: set evaluate.clients to none, or in simulations "
            "to all (simulate: evaluate_clients)"
        )
    if deployed and rounds.evaluate_clients == "all":
        reason = reason or "privacy: clients would send their scores without noise: set evaluate.clients to none"
    if capacities.cover:
        reason = reason or "privacy: capacities.cover lets a client's capacity depend on who else takes part"
    if fleet is not None and fleet.overselect > 1:
        reason = reason or "privacy: fleet.overselect lets the first answers decide who takes part"
    if reason:
        raise ValueError(reason)
