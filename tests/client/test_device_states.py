"""States on a device's disk, and receipts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fedfactor.client.device_states import DeviceStates, Lost
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


def test_states_are_found_by_their_hash_and_written_whole(tmp_path: Path) -> None:
    states = DeviceStates(tmp_path / "client-0")
    first, second = states.write(1, b"first"), states.write(2, bytearray(b"second"))
    assert states.read(first) == b"first" and states.read(second) == b"second"
    with pytest.raises(Lost, match=f"there are {first[:12]}... of round 1, {second[:12]}... of round 2"):
        states.read("0" * 64)
    (tmp_path / "client-0" / f"1.{first}").write_bytes(b"firs")
    with pytest.raises(Lost, match="is damaged"):
        states.read(first)
    (tmp_path / "client-0" / "new.123").write_bytes(b"half of")  # a process killed while it wrote
    assert states.write(2, b"second") == second
    assert states.read(second) == b"second"


def test_only_what_no_job_can_ask_for_is_removed(tmp_path: Path) -> None:
    states = DeviceStates(tmp_path / "client-0")
    names = {version: states.write(version, f"state {version}".encode()) for version in (1, 2, 3, 5)}

    def left() -> set[int]:
        return {int(path.name.partition(".")[0]) for path in states.directory.iterdir()}

    states.settle(names[1], 1)  # of a first round that is asked again: what came after stays
    assert left() == {1, 2, 3, 5}
    states.settle(names[2], 3)  # round 3 builds on version 2: version 1 is overtaken, version 3 was not accepted
    assert left() == {2, 5}
    states.settle(None, 1)  # a job that came late
    assert left() == {2, 5}
    states.settle(names[5], 7)
    assert left() == {5}
    DeviceStates(tmp_path / "nobody").settle(None, 3)
