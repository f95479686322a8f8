"""Devices and their limits, as given on the command line: `phone: 2 MB up, 60 MMAC, 40 MB`."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from fedfactor.protocol import fleet
from fedfactor.protocol.settings import checked
from fedfactor.runs.text import plain

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MACS = {"kMAC": 1e3, "MMAC": 1e6, "GMAC": 1e9, "TMAC": 1e12}
LINKS = {"kbps": 1e-3, "Mbps": 1.0, "Gbps": 1e3}
TIMES = {"s": 1.0, "min": 60.0}


class PlanError(ValueError):
    """A request that cannot be answered; the message says why."""


@checked
class Device(fleet.Device):
    """A kind of device of a fleet with its limits per round; `None` means no limit."""

    name: str = ""
    up: float | None = None
    """Bytes of the upload."""
    down: float | None = None
    """Bytes of the download."""
    macs: float | None = None
    """Multiply-accumulates of the forward pass of one example."""
    seconds: float | None = None
    joules: float | None = None

    def in_fleet(self, mbps_down: float | None, mbps_up: float | None) -> dict[str, Any]:
        """Return the device as a fleet describes it, without limits and with the speeds of its link."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(fleet.Device)}
        found |= {"mbps_down": mbps_down, "mbps_up": mbps_up}
        return {key: value for key, value in found.items() if value is not None}

    @classmethod
    def parse(cls, text: str) -> Device:
        """Parse a device such as `phone: 2 MB up, 60 MMAC, 40 MB`."""
        name, colon, rest = text.partition(":")
        if not colon or not name.strip() or not rest.strip():
            raise PlanError(f"a device must be a name and its limits, such as {EXAMPLE!r}, got {text!r}")
        given: dict[str, Any] = {}
        for words in map(str.strip, rest.split(",")):
            key, value = ("profile", words) if words in fleet.PROFILES else _limit(words, text)
            for one in ("mbps_down", "mbps_up") if key == "mbps" else (key,):
                if one in given:
                    raise PlanError(f"device {text!r} gives its {one} twice")
                given[one] = value
        return cls(name=name.strip(), **given)


EXAMPLE = "phone: 2 MB up, 60 MMAC, 40 MB"
GRAMMAR = (
    "bytes (2 MB up, 4 MB down, 40 MB memory), operations per example (60 MMAC), speed (5 GMAC/s), time (30 s), "
    "energy (5 J), link (2 Mbps, or 10 Mbps down and 2 Mbps up), share of the clients (20 %) or a built-in device "
    f"({', '.join(fleet.PROFILES)})"
)


def _limit(words: str, device: str) -> tuple[str, float]:
    """Parse one limit; return its name and its value in bytes, operations, seconds, joules, Mbps or as a share."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([A-Za-z%]+(?:/s)?)(?:\s+(up|down|memory))?", words)
    if found:
        value, unit, word = float(found[1]), found[2], found[3]
        if unit in UNITS:
            return word or "memory", value * UNITS[unit]
        table: dict[str, tuple[str, float]] = {
            **{name: ("macs", scale) for name, scale in MACS.items()},
            **{f"{name}/s": ("speed", scale) for name, scale in MACS.items()},
            **{name: ("mbps", scale) for name, scale in LINKS.items()},
            **{name: ("seconds", scale) for name, scale in TIMES.items()},
            "J": ("joules", 1.0),
            "%": ("share", 0.01),
        }
        if unit in table and (not word or (unit in LINKS and word != "memory")):
            return "_".join([table[unit][0], *([word] if word else [])]), value * table[unit][1]
    raise PlanError(f"device {device!r}: {words!r} is not a limit; give {GRAMMAR}")


def link(text: str) -> float:
    """Parse the speed of a link, such as 2Mbps; return it in Mbps."""
    key, value = _limit(text.strip(), f"--link {text}")
    if key != "mbps" or not value:
        raise PlanError(f"the speed of a link must be given as in 2Mbps, got {text!r}")
    return value


WORDS = {
    "up": "up",
    "down": "down",
    "memory": "of memory",
    "macs": "per example",
    "seconds": "per round",
    "joules": "per round",
}
"""What a device may limit, and the words that follow the quantity in a sentence."""


def quantity(key: str, value: float) -> str:
    """Format a quantity with its unit."""
    if key in ("up", "down", "memory"):
        return f"{plain(value / 1e6)} MB" if value >= 1e6 else f"{plain(value / 1e3)} kB"
    if key == "macs":
        return f"{plain(value / 1e6)} MMAC"
    return f"{plain(value)} {'s' if key == 'seconds' else 'J'}"


def amount(count: int) -> str:
    """Format a count in thousands or millions."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{plain(count / size)} {unit}"
    return str(count)
