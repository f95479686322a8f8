"""States on a device's disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedfactor.client.device_states import DeviceStates, Lost


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
