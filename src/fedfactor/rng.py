"""Every random number of a run comes from (seed, purpose, round, client), so that order and place do not matter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, purpose: str, round: int = 0, client: int | str = "") -> int:
    """Hash the four into a 63-bit seed."""
    text = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def torch_rng(seed: int, purpose: str, round: int = 0, client: int | str = "") -> torch.Generator:
    """Return a torch generator on the CPU: draws are moved to the device, so they are the same on every device."""
    return torch.Generator().manual_seed(derive(seed, purpose, round, client))


def numpy_rng(seed: int, purpose: str, round: int = 0, client: int | str = "") -> np.random.Generator:
    """Return a numpy generator."""
    return np.random.Generator(np.random.PCG64(derive(seed, purpose, round, client)))


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's own generators, the CPU's and a device's; the CPU's goes back to where it was.

    `torch.manual_seed` seeds every kind of device, and for those that are absent it keeps a stack trace each time.
    """
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
