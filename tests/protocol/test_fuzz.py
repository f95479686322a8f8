"""Damaged replies are refused, or could have come from an honest client. `make fuzz` tries a million of them."""

from __future__ import annotations

from tests.soak.fuzz import fuzz


def test_damaged_messages_are_refused_and_break_nothing() -> None:
    found = fuzz(1000)
    assert not found.wrong
    assert found.refused.total() > 700 and len(found.refused) > 10, "most of them are damaged, in many ways"
    assert found.accepted > 30, "some have other numbers that are as good as the real ones"
