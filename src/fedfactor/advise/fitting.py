"""Find the largest networks of each method that fit all devices."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fedfactor import cost
from fedfactor.advise.devices import WORDS, Device, PlanError, quantity
from fedfactor.advise.gauge import Gauge, Size
from fedfactor.advise.request import Request
from fedfactor.protocol.method import Method, has_global_model, shared_names
from fedfactor.registry import create, entries, get


@dataclass(frozen=True)
class DevicePlan:
    """The network of one method on one device, and its costs."""

    method: str
    device: str
    capacity: float
    settings: dict[str, Any]
    """The method's fields that are not at their defaults."""
    size: Size
    seconds: float | None
    """Time of a round, as far as it is known: transfers and computation."""
    joules: float | None
    bytes_ratio: float
    """Bytes of dense FedAvg divided by the bytes of this network."""
    macs_ratio: float
    """Operations as a share of dense FedAvg's."""
    stopped_by: tuple[str, ...]
    """Limits that the next larger size would exceed; empty if this is the largest."""

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Fit:
    """A method that fits all devices."""

    method: Method
    rows: tuple[DevicePlan, ...]
    """One row per device, in the order of the request."""
    personal: bool
    """Whether the model needs a part that a client keeps."""
    share: float
    """Mean over clients of their operations as a share of dense FedAvg's, at most 1 per client; NaN if not known."""
    federated: bool = True
    """Whether clients share any part of the model. A method without a shared part is a baseline, never the choice."""

    def suits(self, request: Request) -> bool:
        """Return whether this is a federated method of the kind that was asked for."""
        return self.federated and self.personal == request.personal


@dataclass
class Advice:
    """The answer to a request: what fits, what does not fit and why, and the choice."""

    request: Request
    gauge: Gauge
    dense: Size
    """Size of FedAvg with the full model."""
    fits: list[Fit] = field(default_factory=list)
    """The methods that fit all devices, the best first."""
    misfits: dict[str, str] = field(default_factory=dict)
    """Why the other methods do not fit, by name."""

    @property
    def choice(self) -> Fit | None:
        """The best method of the kind that was asked for."""
        return next((fit for fit in self.fits if fit.suits(self.request)), None)


def advise(request: Request) -> Advice:
    """Find the largest networks of each method that fit all devices."""
    gauge, known = Gauge(request), entries("methods")
    wanted = request.methods or tuple(known)
    for name in wanted:
        create("methods", name)  # an unknown name raises an error with the known ones
    fedavg = gauge.ready(create("methods", "fedavg"), [1.0])
    try:
        dense = gauge.size(fedavg, 1.0)
    except Exception as error:
        shape = " x ".join(map(str, request.shape))
        raise PlanError(f"the model cannot take inputs of shape {shape}: {error}") from error
    found = Advice(request, gauge, dense)
    for name in wanted:
        try:
            fit = _fit(name, request, gauge, dense)
        except ValueError as error:  # the method says why it makes no sense here
            found.misfits[name] = str(error)
            continue
        if isinstance(fit, Fit):
            found.fits.append(fit)
        else:
            found.misfits[name] = fit
    found.fits.sort(key=lambda fit: _merit(fit, request), reverse=True)
    return found


def _merit(fit: Fit, request: Request) -> tuple[Any, ...]:
    """Return the sort key of a fit: the wanted kind, then the most operations, then the fewest bytes.

    Devices that can compute the full model should do so. Where all devices can, plain FedAvg comes first. Methods that
    move the base come last, because the bytes of these moves are not counted.
    """
    sent = sum(share * (row.size.up + row.size.down) for share, row in zip(request.shares, fit.rows, strict=True))
    share = 0.0 if math.isnan(fit.share) else round(fit.share, 3)
    return fit.suits(request), not fit.method.traits.moves_base, share, fit.method.name == "fedavg", -sent


def _fit(name: str, request: Request, gauge: Gauge, dense: Size) -> Fit | str:
    """Return the largest networks of a method that fit, or the reason why none fits."""
    method: Method = create("methods", name)
    broken: tuple[str, ...] = ()
    last = ""
    for settings in _settings(name):
        method = create("methods", name, **settings)
        try:
            chosen, stopped, last = _sizes(method, request, gauge)
        except ValueError as error:  # such as a rank above that of a layer
            last = last or str(error)
            continue
        if chosen:
            rows = tuple(
                _row(name, settings, device, level, size, request, dense, stop or broken)
                for device, (level, size), stop in zip(request.devices, chosen, stopped, strict=True)
            )
            shares = (share * min(row.macs_ratio, 1.0) for share, row in zip(request.shares, rows, strict=True))
            ready = gauge.ready(method, [level for level, _ in chosen])
            network, *_ = gauge.measured(ready, chosen[0][0])
            federated = bool(shared_names(ready, network))
            return Fit(method, rows, not has_global_model(ready, network), sum(shares), federated)
        broken = tuple(dict.fromkeys(word for words in stopped for word in words))
    return last


def _settings(name: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of a method to try, the largest networks first: the `tries` in its fields' metadata."""
    fields = dataclasses.fields(get("methods", name).cls)
    tried = {f.name: f.metadata["tries"] for f in fields if "tries" in f.metadata}
    for values in itertools.product(*tried.values()):
        yield dict(zip(tried, values, strict=True))


def _sizes(
    method: Method, request: Request, gauge: Gauge
) -> tuple[list[tuple[float, Size]], list[tuple[str, ...]], str]:
    """Lower the capacities of the devices until all fit.

    All devices step down together, since the network of one capacity may depend on the other capacities. Returns
    capacity and size per device (empty if the method does not fit), the limits that the next larger size exceeds per
    device, and a sentence about what does not fit.
    """
    ladder = sorted(request.capacities, reverse=True) if method.traits.adapts else [1.0]
    steps = [0] * len(request.devices)
    stopped: list[tuple[str, ...]] = [() for _ in request.devices]
    refused: ValueError | None = None
    while True:
        if max(steps) >= len(ladder):  # no remaining size can be built
            assert refused is not None
            raise refused
        levels = [ladder[step] for step in steps]
        try:
            ready = gauge.ready(method, sorted(set(levels), reverse=True))
            sizes = [gauge.size(ready, level) for level in levels]
        except ValueError as error:
            # A method may have no network of this size, if factors would make every layer larger.
            refused = refused or error
            place = ladder.index(max(levels, key=lambda level: (level < 1.0, level)))
            del ladder[place]
            steps = [step - (step > place) for step in steps]
            continue
        over = [_over(device, size, request) for device, size in zip(request.devices, sizes, strict=True)]
        if not any(over):
            return list(zip(levels, sizes, strict=True)), stopped, ""
        stopped = [tuple(found) or before for found, before in zip(over, stopped, strict=True)]
        for device, step, found in zip(request.devices, steps, over, strict=True):
            if found and step + 1 == len(ladder):
                words = [
                    f"{quantity(key, value)} {WORDS[key]}, {device.name} has {quantity(key, getattr(device, key))}"
                    for key, value in found.items()
                ]
                return [], stopped, f"needs {'; '.join(words)}"
        steps = [step + bool(found) for step, found in zip(steps, over, strict=True)]


def _over(device: Device, size: Size, request: Request) -> dict[str, float]:
    """Return the limits of a device that a network exceeds, with what it needs."""
    found = needs_of(device, size, request)
    limits = {key: getattr(device, key) for key in WORDS}
    return {
        key: value
        for key, value in found.items()
        if value is not None and limits[key] is not None and value > limits[key]
    }


def needs_of(device: Device, size: Size, request: Request) -> dict[str, float | None]:
    """Return what a network needs of a device in a round; `None` means unknown."""
    training = request.resolved.training
    work = cost.TRAINING * size.macs * training.seen(request.examples, training.length)
    down, up = request.link_of(device)
    seconds = None
    if down and up:
        seconds = cost.link_seconds(size.down, down, transfers=1) + cost.link_seconds(size.up, up, transfers=1)
    if isinstance(device.speed, float):
        seconds = (seconds or 0.0) + work / device.speed
    per_byte, per_mac = request.energy_of(device)
    joules = None
    if per_byte is not None or per_mac is not None:
        joules = (per_byte or 0.0) * (size.down + size.up) + (per_mac or 0.0) * work
    return {
        "up": size.up, "down": size.down, "memory": size.memory, "macs": size.macs, "seconds": seconds,
        "joules": joules,
    }  # fmt: skip


def _row(
    name: str, settings: dict[str, Any], device: Device, level: float, size: Size, request: Request, dense: Size,
    stopped: tuple[str, ...],
) -> DevicePlan:  # fmt: skip
    needs = needs_of(device, size, request)
    ratio = (dense.down + dense.up) / (size.down + size.up)
    return DevicePlan(
        name, device.name, level, settings, size, needs["seconds"], needs["joules"], ratio, size.macs / dense.macs,
        stopped,
    )  # fmt: skip
