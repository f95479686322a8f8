"""Receipts of states that stay on the clients' disks."""

from __future__ import annotations

import hashlib

import pytest

from fedfactor.protocol.states import Elsewhere, at_hand, receipt, receipt_sha256, state_sha256
from fedfactor.server.state import private_sha256
from fedfactor.server.store import MemoryStore


def test_a_receipt_stands_for_a_state() -> None:
    sha256 = hashlib.sha256(b"a state").hexdigest()
    held = receipt(sha256)
    assert len(held) == 72 and receipt_sha256(held) == sha256 and receipt_sha256(b"a state") is None
    assert state_sha256(held) == state_sha256(b"a state") == sha256
    assert at_hand(b"a state") == b"a state"
    with pytest.raises(Elsewhere, match=sha256[:12]):
        at_hand(held)
    for wrong in ("", "ab", sha256.upper(), "../" * 30):
        with pytest.raises(ValueError, match="64 hexadecimal digits"):
            receipt(wrong)


def test_the_hash_of_all_states_is_the_same_of_their_receipts() -> None:
    whole, held = MemoryStore(), MemoryStore()
    states = {1: b"one", 3: b"three"}
    whole.commit(1, {"client": states, "server": {2: b"two"}}, b"", {})
    receipts = {client: receipt(hashlib.sha256(state).hexdigest()) for client, state in states.items()}
    held.commit(1, {"client": receipts, "server": {2: b"two"}}, b"", {})
    assert private_sha256(whole) == private_sha256(held)
    text = "".join(
        f"{section}:{client}:{hashlib.sha256(state).hexdigest()}\n"
        for section, client, state in (("client", 1, b"one"), ("client", 3, b"three"), ("server", 2, b"two"))
    )
    assert private_sha256(whole) == hashlib.sha256(text.encode()).hexdigest()
    held.commit(2, {"client": {3: receipt(hashlib.sha256(b"other").hexdigest())}}, b"", {})
    assert private_sha256(whole) != private_sha256(held)
