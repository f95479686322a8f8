"""Receipts of states that stay on the clients' disks."""

from __future__ import annotations

import hashlib

import pytest

from fedfactor.protocol.states import Elsewhere, at_hand, receipt, receipt_sha256, state_sha256


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
