"""What devices can take, as the command line says it: `phone: 2 MB up, 60 MMAC, 40 MB`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fedfactor.runs.text import plain

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MACS = {"kMAC": 1e3, "MMAC": 1e6, "GMAC": 1e9, "TMAC": 1e12}
LINKS = {"kbps": 1e-3, "Mbps": 1.0, "Gbps": 1e3}
TIMES = {"s": 1.0, "min": 60.0}


class PlanError(ValueError):
    """A plan that cannot be made as asked."""


@dataclass(frozen=True)
class Device:
    """What a kind of device can take in a round; `None` is no limit."""

    name: str
    up: float | None = None
    """Bytes."""
    down: float | None = None
    memory: float | None = None
    """Bytes: weights, gradients, momentum, and what a batch leaves for the backward pass."""
    macs: float | None = None
    """Multiply-accumulates of an example's forward pass."""
    seconds: float | None = None
    joules: float | None = None
    speed: float | None = None
    """Multiply-accumulates a second."""
    mbps: float | None = None
    share: float | None = None
    """Share of the clients that are such devices."""

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read `phone: 2 MB up, 60 MMAC, 40 MB`."""
        name, colon, rest = text.partition(":")
        if not colon or not name.strip() or not rest.strip():
            raise PlanError(f"a device is a name and its limits, such as {EXAMPLE!r}, got {text!r}")
        given: dict[str, float] = {}
        for words in rest.split(","):
            key, value = _limit(words.strip(), text)
            if key in given:
                raise PlanError(f"device {text!r} says twice what its {key} is")
            given[key] = value
        return cls(name.strip(), **given)


EXAMPLE = "phone: 2 MB up, 60 MMAC, 40 MB"
GRAMMAR = (
    "bytes (2 MB up, 4 MB down, 40 MB memory), operations (60 MMAC an example's forward pass, 5 GMAC/s), time (30 s), "
    "energy (5 J), link (2 Mbps) or share of the clients (20 %)"
)


def _limit(words: str, device: str) -> tuple[str, float]:
    """Read one limit: which it is, and its value in bytes, operations, seconds, joules, Mbps or as a share."""
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
        if unit in table and not word:
            return table[unit][0], value * table[unit][1]
    raise PlanError(f"device {device!r}: {words!r} is no limit; legal are {GRAMMAR}")


def link(text: str) -> float:
    """Read the speed of a link, such as 2Mbps, in Mbps."""
    key, value = _limit(text.strip(), f"--link {text}")
    if key != "mbps" or not value:
        raise PlanError(f"a link has a speed such as 2Mbps, got {text!r}")
    return value


WORDS = {
    "up": "up",
    "down": "down",
    "memory": "of memory",
    "macs": "an example",
    "seconds": "a round",
    "joules": "a round",
}
"""What a device may limit, and how a sentence names it."""


def quantity(key: str, value: float) -> str:
    """Write a quantity with its unit."""
    if key in ("up", "down", "memory"):
        return f"{plain(value / 1e6)} MB" if value >= 1e6 else f"{plain(value / 1e3)} kB"
    if key == "macs":
        return f"{plain(value / 1e6)} MMAC"
    return f"{plain(value)} {'s' if key == 'seconds' else 'J'}"


def amount(count: int) -> str:
    """Write a count in thousands or millions."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{plain(count / size)} {unit}"
    return str(count)
