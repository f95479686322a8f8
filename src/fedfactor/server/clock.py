"""The virtual clock: how long each client of a round takes on its device, and which clients the server waits for.

All times are known before a client trains: they follow from the lengths of its messages, the operations of its network,
its device, and random numbers of (seed, round, client). Clients that are dropped are therefore not trained at all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedfactor import cost
from fedfactor.protocol.fleet import Device, Fleet
from fedfactor.protocol.method import Participant
from fedfactor.protocol.settings import Capacities, Reported
from fedfactor.protocol.setup import Setup
from fedfactor.rng import numpy_rng
from fedfactor.server.costs import Costs
from fedfactor.server.replies import Failure

PHASES = ("offline", "download", "compute", "upload")
"""What a client does in a round, in this order. All periods in which it is not available are added up as `offline`."""


Outcome = Literal["used", "late", "failed", "surplus", "pending"]
"""What becomes of a client's reply; a pending one is used in a later round."""


@dataclass(frozen=True)
class Timing:
    """The simulated seconds of one client in one round."""

    who: Participant
    device: str
    phases: tuple[float, ...]
    """Seconds of each of `PHASES`."""
    bytes: tuple[float, ...]
    """Bytes moved in each of `PHASES`."""
    joules: tuple[float, ...]
    """Energy of each of `PHASES`; NaN if it is not known."""
    fails_after: float = math.inf
    outcome: Outcome = "used"

    @property
    def end(self) -> float:
        """The second of the round in which the client has answered, or has failed."""
        return min(sum(self.phases), self.fails_after)

    @property
    def spans(self) -> list[float]:
        """Seconds of each of `PHASES`, up to the failure if the client fails."""
        starts = itertools.accumulate(self.phases, initial=0.0)
        return [min(seconds, max(0.0, self.end - start)) for seconds, start in zip(self.phases, starts, strict=False)]

    def until(self, second: float, amounts: tuple[float, ...]) -> float:
        """Return the part of some amounts, one per phase, that falls into the first seconds of the round."""
        start, total, second = 0.0, 0.0, min(second, self.end)
        for seconds, amount in zip(self.phases, amounts, strict=True):
            total += amount * min(1.0, max(0.0, second - start) / seconds) if seconds else 0.0
            start += seconds
        return total


@dataclass(frozen=True)
class Timeline:
    """The clients of one round on the clock."""

    clients: tuple[Timing, ...]
    """All clients that were asked, in the order in which they were drawn."""
    seconds: float
    deadline: float | None
    energy: bool
    waits: bool = False
    """Whether clients go on after the end of the round."""

    def of(self, *outcomes: str) -> list[Participant]:
        """Return the clients with these outcomes."""
        return [one.who for one in self.clients if one.outcome in outcomes]

    @property
    def failures(self) -> list[Failure]:
        """The clients that were dropped although they were needed."""
        why = {"failed": "its device failed", "late": f"later than the deadline of {self.deadline or 0:g} s"}
        return [Failure(one.who.client, why[one.outcome]) for one in self.clients if one.outcome in why]

    @property
    def counts(self) -> dict[str, float]:
        """What is added to the totals of the run."""
        joules = sum(one.until(math.inf if self.waits else self.seconds, one.joules) for one in self.clients)
        return {"simulated_seconds": self.seconds} | ({"simulated_joules": joules} if self.energy else {})

    def too_late(self) -> str:
        """Say that nobody meets the deadline, and what the fastest client needs."""
        first = min((one for one in self.clients if one.outcome == "late"), key=lambda one: one.end)
        return (
            f"no client meets fleet.deadline = {self.deadline or 0:g} s: the fastest, client {first.who.client} with "
            f"device {first.device!r}, needs {first.end:.3g} s. Raise the deadline, or let clients train less"
        )

    def event(self) -> dict[str, Any]:
        """Return the round on the clock as plain data: numbers of the round, and one list entry per client."""
        dropped = [one for one in self.clients if one.outcome not in ("used", "pending")]
        outcomes = ("used", "late", "failed", "surplus", *(["pending"] if self.waits else []))
        columns = zip(*(one.spans for one in self.clients), strict=True)
        return {
            **{key.removeprefix("simulated_"): value for key, value in self.counts.items()},
            **{outcome: len(self.of(outcome)) for outcome in outcomes},
            "wasted_bytes": round(sum(one.until(self.seconds, one.bytes) for one in dropped)),
            "clients": [one.who.client for one in self.clients],
            "devices": [one.device for one in self.clients],
            "outcomes": [one.outcome for one in self.clients],
            **{
                phase: [float(f"{value:.6g}") for value in column]
                for phase, column in zip(PHASES, columns, strict=True)
            },
        }


class Clock:
    """Times the clients of a run on the devices of a fleet."""

    def __init__(self, fleet: Fleet, setup: Setup, costs: Costs) -> None:
        data = setup.task.data
        if data.described:
            raise ValueError(
                "fleet: the number of examples per client is not known, because the clients' data are on their "
                "devices; leave out [fleet], which is for simulated devices"
            )
        if math.isnan(costs.macs(1.0)):
            raise ValueError("fleet: the model's operations cannot be counted, so its time on a device is not known")
        self._fleet, self._setup, self._costs, self._seed = fleet, setup, costs, setup.training.seed
        self._devices = list(fleet.devices.items())
        self._kinds = fleet.assign(self._seed, data.clients)

    @property
    def start(self) -> dict[str, float]:
        """The totals of a run before its first round."""
        return {"simulated_seconds": 0.0} | ({"simulated_joules": 0.0} if self._fleet.counts_energy else {})

    def described(self, capacities: Capacities) -> dict[str, Any]:
        """Return what the run's first event says about the fleet: clients per device, and capacities that it fixed."""
        counts = {name: int((self._kinds == kind).sum()) for kind, (name, _) in enumerate(self._devices)}
        given = list(capacities.given.values()) if isinstance(capacities, Reported) else []
        return {"fleet": {"devices": counts} | ({"capacities": given} if self._fleet.fit_capacities else {})}

    def asked(self, cohort: list[int], round: int) -> list[int]:
        """Return the clients to ask in a round: its cohort, and further ones if more are asked than are needed."""
        population = self._setup.task.data.clients
        size = min(population, math.ceil(len(cohort) * self._fleet.overselect))
        if size == len(cohort):
            return cohort
        # Enough for all that are wanted, even if the whole cohort is among them.
        drawn = numpy_rng(self._seed, "overselect", round).choice(
            population, size=min(population, len(cohort) + size), replace=False
        )
        others = [int(client) for client in drawn if client not in {*cohort}]
        return [*cohort, *others[: size - len(cohort)]]

    def round(self, asked: Sequence[Participant], needed: int, further: Callable[[int], int]) -> Timeline:
        """Time the clients of a round, and decide which of them the server uses: the first `needed` in time.

        `further` returns the bytes that a client downloads in addition to a usual download.
        """
        fleet, timings = self._fleet, [self.timing(who, further(who.client)) for who in asked]
        limit = math.inf if fleet.deadline is None else fleet.deadline
        failed = {one.who.client for one in timings if one.fails_after < math.inf and one.end <= limit}
        in_time = sorted(
            (one for one in timings if one.who.client not in failed and one.end <= limit), key=lambda one: one.end
        )
        used = {one.who.client for one in in_time[:needed]}
        enough = len(used) == needed
        seconds = in_time[needed - 1].end if enough else min(limit, max(one.end for one in timings))

        def outcome(one: Timing) -> Outcome:
            if one.who.client in used:
                return "used"
            if enough:  # nobody waits for the others any more
                return "surplus" if one.end > seconds or one.who.client not in failed else "failed"
            return "failed" if one.who.client in failed else "late"

        found = tuple(replace(one, outcome=outcome(one)) for one in timings)
        return Timeline(found, seconds, fleet.deadline, fleet.counts_energy)

    def timing(self, who: Participant, further: int = 0) -> Timing:
        """Return the simulated seconds of a client in its round."""
        name, device = self._devices[self._kinds[who.client]]
        down, up, macs = self._needs(who)
        needs = down, up, macs = down + further, up, macs
        rng = numpy_rng(self._seed, "link", who.round, who.client)
        factors = [math.exp((device.spread or 0.0) * rng.standard_normal()) for _ in range(2)]
        download, compute, upload = _seconds(device, needs, *factors)
        offline = 0.0
        if device.off_seconds:
            # Periods have exponential lengths, so the number of interruptions of some work is a Poisson variable.
            rng = numpy_rng(self._seed, "offline", who.round, who.client)
            begins_offline = rng.random() >= (device.availability or 1.0)
            pauses = int(begins_offline) + rng.poisson((download + compute + upload) / (device.on_seconds or 1.0))
            offline = float(rng.gamma(pauses, device.off_seconds)) if pauses else 0.0
        phases = offline, download, compute, upload
        rng = numpy_rng(self._seed, "failure", who.round, who.client)
        fails, share = rng.random() < (device.failure or 0.0), rng.random()
        prices = device.joules_per_byte, device.joules_per_mac
        per_byte, per_mac = (math.nan if one is None else one for one in prices)
        joules = 0.0, per_byte * down, per_mac * macs, per_byte * up
        return Timing(who, name, phases, (0.0, down, 0.0, up), joules, share * sum(phases) if fails else math.inf)

    def _needs(self, who: Participant) -> tuple[float, float, float]:
        """Return the bytes down and up and the multiply-accumulates of a client in its round."""
        return *self._costs.lengths(who.capacity, who.round), self._costs.training_macs(who)

    # Capacities.

    def fitted(self, capacities: Capacities) -> Capacities:
        """Return capacities in which each client has the largest level that fits its device, if the fleet says so.

        Raise ValueError if a device has too little memory for each level, or for a level that its clients may have.
        """
        fleet, levels = self._fleet, capacities.levels
        fitting = {name: [level for level in levels if self._fits(device, level)] for name, device in self._devices}
        for name, device in self._devices:
            if not fitting[name]:
                need = self._costs.memory(levels[-1])
                raise ValueError(
                    f"fleet: device {name!r} fits no capacity: the smallest, {levels[-1]:g}, needs {need / 1e6:.3g} MB "
                    f"to train a batch of {self._setup.training.batch_size}, and the device has "
                    f"{(device.memory or 0) / 1e6:.3g} MB. Try a smaller batch, model or level in capacities.levels"
                )
        if not fleet.fit_capacities:
            self._check_memory(capacities, fitting)
            return capacities
        if capacities.dynamic:
            raise ValueError("fleet.fit_capacities fixes each client's capacity; set capacities.dynamic to false")
        given = {}
        for client, kind in enumerate(self._kinds):
            name, device = self._devices[kind]
            in_time = (level for level in fitting[name] if self._in_time(device, Participant(client, level, 0)))
            given[client] = next(in_time, fitting[name][-1])  # too late at every level: dropped when it is drawn
        return Reported(capacities.shares, given=given)

    def _fits(self, device: Device, level: float) -> bool:
        return device.memory is None or self._costs.memory(level) <= device.memory

    def _in_time(self, device: Device, who: Participant) -> bool:
        """Return whether a client meets the deadline at the median speed of its link, if it is always available."""
        return self._fleet.deadline is None or sum(_seconds(device, self._needs(who))) <= self._fleet.deadline

    def _check_memory(self, capacities: Capacities, fitting: dict[str, list[float]]) -> None:
        places = capacities.assign(self._seed, len(self._kinds))
        for kind, (name, device) in enumerate(self._devices):
            there = {*places[self._kinds == kind]} if not capacities.dynamic else range(len(capacities.levels))
            for level in sorted({capacities.levels[place] for place in there} - {*fitting[name]}):
                need = self._costs.memory(level)
                raise ValueError(
                    f"fleet: clients with device {name!r} and capacity {level:g} need {need / 1e6:.3g} MB to train a "
                    f"batch of {self._setup.training.batch_size}, and have {(device.memory or 0) / 1e6:.3g} MB. Set "
                    "fleet.fit_capacities to true, or give smaller levels, a smaller batch or more memory"
                )


def _seconds(
    device: Device, needs: tuple[float, float, float], faster_down: float = 1.0, faster_up: float = 1.0
) -> tuple[float, float, float]:
    """Return the seconds of download, computation and upload; a link may be faster than its median."""
    down, up, macs = needs
    assert device.mbps_down and device.mbps_up and isinstance(device.speed, float)  # a fleet checks this
    return (
        cost.link_seconds(down, device.mbps_down * faster_down, transfers=1),
        macs / device.speed,
        cost.link_seconds(up, device.mbps_up * faster_up, transfers=1),
    )
