"""Fleets: kinds of devices, which client has which, and how long the server waits for them.

The numbers of a built-in profile cite the source that they were taken from; all others are marked as assumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, Field

from fedfactor.protocol.settings import Level, Nonnegative, checked
from fedfactor.rng import numpy_rng
from fedfactor.support.checks import near

ASSUMED = "assumed"
NCNN = "ncnn, benchmark/README.md: ResNet-18 (1.814 GMAC per picture) on {}"
OOKLA_5G = "Ookla, 'Growing and Slowing: The State of 5G Worldwide in 2021': median speeds over 5G, Q3 2021"
OOKLA_MOBILE = "Ookla Speedtest Global Index, USA, Q3 2022: median speeds of mobile networks"
OOKLA_FIXED = "Ookla, United States Market Report, Q2 2020: median speeds of fixed broadband"
HUANG = "Huang et al., 'A Close Examination of Performance and Power Characteristics of 4G LTE Networks', 2012: medians"
RESNET18 = 1.814e9
"""Multiply-accumulates of ResNet-18 for one picture of 224 x 224, by which ncnn's times become speeds."""


class Profile(NamedTuple):
    """The numbers of a built-in kind of device by field of `Device`, each with its source."""

    summary: str
    numbers: Mapping[str, tuple[float, str]]


def _profile(
    summary: str,
    milliseconds: float,
    run: str,
    mbps: tuple[float, float],
    link: str,
    memory: float,
    watts: tuple[float, str],
    joules_per_byte: float,
) -> Profile:
    """Build a profile from the time of one ResNet-18 picture, the speeds of the link down and up, and the power."""
    speed = float(f"{RESNET18 / milliseconds * 1e3:.3g}")
    power, source = watts
    numbers = {
        "speed": (speed, NCNN.format(f"{run}: {milliseconds} ms")),
        "memory": (memory, ASSUMED),
        "mbps_down": (mbps[0], link),
        "mbps_up": (mbps[1], link),
        "spread": (0.6, ASSUMED),
        "joules_per_mac": (float(f"{power / speed:.3g}"), f"{power:g} W ({source}), divided by the speed"),
        "joules_per_byte": (joules_per_byte, ASSUMED),
    }
    return Profile(summary, numbers)


_PI_WATTS = 15.0, "Feiereisen, 'Benchmarking the Raspberry Pi 4', 2022"
PROFILES: Mapping[str, Profile] = {
    "phone-low": _profile(
        "a phone of 2014 on LTE", 178.58, "Snapdragon 410, 4 threads", (13.0, 6.0), HUANG, 256e6, (2.0, ASSUMED), 5e-6
    ),
    "phone-mid": _profile(
        "a phone of 2018 on a mobile network", 80.0, "Snapdragon 660, 8 threads", (68.34, 8.56), OOKLA_MOBILE, 1e9,
        (3.0, ASSUMED), 2e-6,
    ),
    "phone-high": _profile(
        "a phone of 2019 on 5G", 23.73, "Snapdragon 855+, 1 thread", (166.13, 21.08), OOKLA_5G, 2e9, (4.0, ASSUMED),
        1e-6,
    ),
    "raspberry-pi": _profile(
        "a Raspberry Pi 4 at home", 233.89, "Raspberry Pi 4 Model B, 4 threads", (86.04, 11.86), OOKLA_FIXED, 1e9,
        _PI_WATTS, 1e-7,
    ),
    "gateway": _profile(
        "an embedded PC at home or on a site", 37.58, "Ryzen Embedded V1605B, 4 threads", (86.04, 11.86), OOKLA_FIXED,
        4e9, (25.0, ASSUMED), 1e-7,
    ),
    "workstation": _profile(
        "a hospital's workstation with a GPU", 1.56, "Quadro RTX 8000", (1000.0, 1000.0), ASSUMED, 32e9,
        (260.0, ASSUMED), 1e-8,
    ),
}  # fmt: skip
"""Built-in kinds of devices. Speeds are those of forward passes; training is assumed to be as fast per operation."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MEASURED = "measured"


def _known(name: str) -> str:
    if name not in PROFILES:
        raise ValueError(f"must be a built-in profile; {near(name, PROFILES)}there are {', '.join(PROFILES)}")
    return name


@checked
class Device:
    """A kind of device. What is not given is taken from its profile, if it has one."""

    profile: Annotated[str, AfterValidator(_known)] | None = None
    """A built-in kind of device whose numbers hold where none are given."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the clients with this kind of device. Devices without a share divide the rest evenly."""
    speed: Positive | Literal["measured"] | None = None
    """Multiply-accumulates per second in training, or "measured": the speed of this machine when the run starts."""
    memory: Positive | None = None
    """Bytes for weights, gradients, the optimizer's state and the activations of a batch. Default: no limit."""
    mbps_down: Positive | None = None
    """Median speed of downloads in Mbps."""
    mbps_up: Positive | None = None
    """Median speed of uploads in Mbps."""
    spread: Nonnegative | None = None
    """Standard deviation of the logarithm of the link's speed, drawn anew per client and round. Default: 0."""
    availability: Level | None = None
    """Share of the time in which a device is on and connected. Default: 1."""
    on_seconds: Positive | None = None
    """Mean length of the periods in which a device is available. Default: 3600."""
    failure: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Probability that a device fails in a round. Default: 0."""
    joules_per_mac: Nonnegative | None = None
    """Energy per multiply-accumulate. Default: not known."""
    joules_per_byte: Nonnegative | None = None
    """Energy per byte that the device sends or receives. Default: not known."""

    def __post_init__(self) -> None:
        numbers = PROFILES[self.profile].numbers if self.profile else {}
        for name, value in {**DEFAULTS, **{key: number for key, (number, _) in numbers.items()}}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def off_seconds(self) -> float:
        """Mean length of the periods in which a device is not available."""
        assert self.availability and self.on_seconds  # __post_init__ has set them
        return self.on_seconds * (1 - self.availability) / self.availability


DEFAULTS = {"spread": 0.0, "availability": 1.0, "on_seconds": 3600.0, "failure": 0.0}
NEEDED = ("speed", "mbps_down", "mbps_up")
"""Fields without which a device has no place on the clock."""


def shares_of(devices: Mapping[str, Device]) -> list[float]:
    """Return the share of the clients per device. Raise ValueError if the shares do not add up."""
    given = [device.share for device in devices.values()]
    rest, open_ = 1.0 - sum(share or 0.0 for share in given), given.count(None)
    if rest < -1e-9 or (not open_ and abs(rest) > 1e-9):
        raise ValueError(f"the shares of the devices add up to {100 * (1 - rest):g} %, not 100 %")
    if open_ and rest < 1e-9:
        raise ValueError("the shares of the devices leave no clients for the devices without a share")
    return [rest / open_ if share is None else share for share in given]


@checked
class Fleet:
    """The devices of the clients, and how long the server waits for them in a round."""

    devices: Annotated[Mapping[str, Device], Field(min_length=1)]
    """Kinds of devices by name."""
    of_clients: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """The name of each client's device, in the clients' order. Default: clients draw devices by their shares."""
    deadline: Positive | None = None
    """Seconds after which a round ends; later clients are dropped. Default: the server waits for all."""
    overselect: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Clients that are asked per client that is needed: with 1.3, the first 10 answers of 13 clients are used."""
    fit_capacities: bool = False
    """Whether each client has the largest capacity that fits its memory and the deadline, whatever the shares are."""

    def __post_init__(self) -> None:
        for name, device in self.devices.items():
            missing = [key for key in NEEDED if getattr(device, key) is None]
            if missing:
                raise ValueError(f"devices.{name} has no {' and no '.join(missing)}: give it, or a profile")
        unknown = sorted({*self.of_clients} - {*self.devices})
        if unknown:
            raise ValueError(f"of_clients names devices that are not described: {', '.join(unknown[:3])}")
        if not self.of_clients:
            shares_of(self.devices)

    @classmethod
    def of_profiles(cls, shares: Mapping[str, float], **options: Any) -> Fleet:
        """Return a fleet of built-in devices, given the share of the clients that have each."""
        return cls({name: Device(profile=name, share=share) for name, share in shares.items()}, **options)

    @property
    def names(self) -> list[str]:
        """Names of the kinds of devices."""
        return list(self.devices)

    @property
    def counts_energy(self) -> bool:
        """Whether the energy of all devices is known."""
        return all(None not in (one.joules_per_mac, one.joules_per_byte) for one in self.devices.values())

    def assign(self, seed: int, population: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Give each client a kind of device (its index in `names`) so that the shares hold exactly."""
        if self.of_clients:
            if len(self.of_clients) != population:
                raise ValueError(
                    f"fleet: devices are given for {len(self.of_clients)} clients, but there are {population}"
                )
            place = {name: number for number, name in enumerate(self.devices)}
            return np.array([place[name] for name in self.of_clients])
        edges = np.rint(np.cumsum(shares_of(self.devices)) * population).astype(np.int64)
        blocks = np.repeat(np.arange(len(edges)), np.diff(edges, prepend=0))
        return numpy_rng(seed, "fleet").permutation(blocks)

    def with_speed(self, measured: float) -> Fleet:
        """Return the fleet with the speed of this machine where a device's speed is to be measured."""
        found = {
            name: dataclasses.replace(one, speed=measured) if one.speed == MEASURED else one
            for name, one in self.devices.items()
        }
        return dataclasses.replace(self, devices=found)
