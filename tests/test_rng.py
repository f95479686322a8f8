"""Random numbers that depend on seed, purpose, round and client only."""

from __future__ import annotations

import hashlib

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfactor.rng import derive, numpy_rng, seeded, torch_rng


def test_seeding_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with seeded(5):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeded(5):
        assert torch.equal(torch.rand(3), first) and not torch.equal(first, expected)


@given(seed=st.integers(0, 2**40), round=st.integers(0, 2**20), client=st.integers(0, 2**20))
def test_seeds_depend_on_every_argument(seed: int, round: int, client: int) -> None:
    one = derive(seed, "batches", round, client)
    assert one == derive(seed, "batches", round, client) and 0 <= one < 2**63
    others = {derive(seed + 1, "batches", round, client), derive(seed, "plan", round, client)}
    others |= {derive(seed, "batches", round + 1, client), derive(seed, "batches", round, client + 1)}
    assert len(others | {one}) == 5


def test_seeds_are_the_same_on_every_machine() -> None:
    """BLAKE2b of the text, its first eight bytes as a little-endian number without the lowest bit."""
    digest = hashlib.blake2b(b"7/plan/3/12", digest_size=8).digest()
    assert derive(7, "plan", 3, 12) == int.from_bytes(digest, "little") // 2
    assert torch_rng(7, "plan").initial_seed() == derive(7, "plan")
    assert numpy_rng(7, "plan", 3).integers(2**40) == numpy_rng(7, "plan", 3).integers(2**40)
