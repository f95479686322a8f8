"""What the user asks for: a model, its input, the devices and the training settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedfactor import models
from fedfactor.advise.devices import EXAMPLE, Device, PlanError
from fedfactor.protocol.fleet import shares_of
from fedfactor.runs import recipe

CAPACITIES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625)
"""Shares of the full model to try for methods with networks of several sizes."""
CLIENTS, COHORT, EXAMPLES = 100, 0.1, 500
"""Defaults: clients and cohort of a written recipe, and training examples per client."""


@dataclass(frozen=True)
class Request:
    """What the user asks for: a model, its input, the devices and the training settings."""

    tables: recipe.Table
    """Tables of a recipe; its data and its method are not used."""
    devices: tuple[Device, ...]
    shape: tuple[int, ...]
    tokens: int = 0
    """Size of the vocabulary if inputs are token ids, otherwise 0."""
    classes: int = 10
    mbps: float | None = None
    examples: int = EXAMPLES
    joules_per_mb: float | None = None
    joules_per_gmac: float | None = None
    capacities: tuple[float, ...] = CAPACITIES
    personal: bool = False
    """Whether to choose among methods with personal models."""
    methods: tuple[str, ...] = ()
    """Methods to consider; empty means all."""
    data: str | None = None
    """Name of the data set of a written recipe."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlanError(f"give at least one device, such as {EXAMPLE!r}")
        known = [device.name for device in self.devices]
        if len(set(known)) != len(known):
            raise PlanError(f"devices need different names, got {', '.join(known)}")
        _ = self.shares  # raises an error if they do not add up
        if not self.shape or min(self.shape) < 1:
            raise PlanError(f"the shape of an input must look like 3x32x32, got {self.shape}")
        if not self.capacities or not all(0 < level <= 1 for level in self.capacities):
            raise PlanError(f"capacities must lie in (0, 1], got {list(self.capacities)}")
        for device in self.devices:
            if device.seconds is not None and None in self.link_of(device):
                raise PlanError(f"{device.name} limits the seconds per round; give the speed of the link: --link 2Mbps")
            if device.joules is not None and None in self.energy_of(device):
                raise PlanError(f"{device.name} limits energy; give --joules-per-mb and --joules-per-gmac")

    def link_of(self, device: Device) -> tuple[float | None, float | None]:
        """Return the speed of a device's link in Mbps, down and up."""
        return device.mbps_down or self.mbps, device.mbps_up or self.mbps

    def energy_of(self, device: Device) -> tuple[float | None, float | None]:
        """Return the energy per byte and per multiply-accumulate, as requested or of the device."""
        asked = (self.joules_per_mb, 1e6, device.joules_per_byte), (self.joules_per_gmac, 1e9, device.joules_per_mac)
        byte, mac = (own if given is None else given / scale for given, scale, own in asked)
        return byte, mac

    @cached_property
    def resolved(self) -> recipe.Recipe:
        """The checked settings of training, codec and model."""
        return recipe.resolve(self.tables, "plan")

    def check_data(self) -> None:
        """Raise PlanError if no recipe can be written, whatever the choice, because the data set is not known."""
        if self.data is None:
            raise PlanError("a recipe needs a data set that `fedfactor run` can load: give one, such as --data cifar10")

    @property
    def shares(self) -> list[float]:
        """Share of the clients per device. Devices without a share divide the rest evenly."""
        try:
            return shares_of({device.name: device for device in self.devices})
        except ValueError as error:
            raise PlanError(str(error)) from None


KNOWN_DATA = {
    ("1x8x8", 10): "digits", ("1x28x28", 10): "mnist", ("1x28x28", 62): "femnist", ("3x32x32", 10): "cifar10",
    ("3x32x32", 100): "cifar100",
}  # fmt: skip
"""Data sets by the shape of their inputs and their number of classes."""


def request_of(
    model: str,
    shape: str | None,
    classes: int | None,
    devices: Sequence[str],
    *,
    data: str | None = None,
    tokens: int = 0,
    rounds: int | None = None,
    settings: Sequence[str] = (),
    **options: Any,
) -> Request:
    """Make a request from options of the command line. A registered model knows its own input shape."""
    known = models.info(model) if ":" not in model else None
    if shape is None and (known is None or known.input_shape is None):
        raise PlanError("give the shape of an input: --input 3x32x32, or --input 64 --tokens 10000 for texts")
    sizes = _sides(shape) if shape is not None else tuple(known.input_shape or ()) if known else ()
    if known is not None and not known.input_dtype.is_floating_point:
        tokens = tokens or known.tokens
    wanted = data or KNOWN_DATA.get(("x".join(map(str, sizes)), classes or 10))
    tables: recipe.Table = {
        "name": "plan",
        "data": {"name": wanted or "digits"},  # required in a recipe, but not used here
        "partition": {"kind": "iid", "clients": CLIENTS},
        "model": {"name": model},
        "train": {"cohort": COHORT} | ({} if rounds is None else {"rounds": rounds}),
    }
    tables = recipe.override(tables, list(settings))
    parsed = tuple(Device.parse(text) for text in devices)
    return Request(tables, parsed, sizes, tokens, classes or 10, data=wanted, **options)


def _sides(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text):
        raise PlanError(f"the shape of an input must look like 3x32x32, got {text!r}")
    return tuple(int(side) for side in text.split("x"))
