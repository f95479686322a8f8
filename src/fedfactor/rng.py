"""Random numbers that depend only on (seed, purpose, round, client).

The order in which clients run, and the process or machine they run in, therefore change nothing.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, purpose: str, round: int = 0, client: int | str = "") -> int:
    """Return a 63-bit seed, a hash of the four arguments."""
    text = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def torch_rng(seed: int, purpose: str, round: int = 0, client: int | str = "") -> torch.Generator:
    """Return a torch generator on the CPU. Move what it draws to a device: so it is the same on every device."""
    return torch.Generator().manual_seed(derive(seed, purpose, round, client))


def numpy_rng(seed: int, purpose: str, round: int = 0, client: int | str = "") -> np.random.Generator:
    """Return a numpy generator."""
    return np.random.Generator(np.random.PCG64(derive(seed, purpose, round, client)))


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread, and restore the number at the end: sums round differently with another number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's global generators of the CPU and of one device, and restore the CPU's at the end.

    `torch.manual_seed` would seed all kinds of devices, and store a stack trace per call for those that are absent.
    """
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


@contextmanager
def all_seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of torch (CPU), numpy and Python, and restore them at the end."""
    numbers, python = np.random.get_state(), random.getstate()
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        with seeded(seed):
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(python)
