"""Stores and journals: a round is committed completely or not at all, and damaged files are named."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfactor.protocol.message import Message, encode
from fedfactor.server.store import Damaged, DiskStore, Journal, MemoryStore, Store
from fedfactor.testing.federation import outcome
from tests.helpers.folding import commit as commit_states
from tests.helpers.tiny import run

SERVER = [bytes(encode(Message("server", {"kinds": [str(round)]}))) for round in range(4)]
ROUNDS: list[dict[str, dict[int, bytes]]] = [
    {},
    {"client": {0: b"a1", 300: b"b1"}, "server": {0: b"s1"}},
    {"client": {300: b"b2", 7: b"c2"}},
    {"client": {0: b"a3"}, "server": {7: b"t3"}},
]
"""What four rounds change; clients 44 and 300 would share a folder."""
AFTER: list[dict[str, dict[int, bytes]]] = [
    {"client": {}, "server": {}},
    {"client": {0: b"a1", 300: b"b1"}, "server": {0: b"s1"}},
    {"client": {0: b"a1", 7: b"c2", 300: b"b2"}, "server": {0: b"s1"}},
    {"client": {0: b"a3", 7: b"c2", 300: b"b2"}, "server": {0: b"s1", 7: b"t3"}},
]
"""What the store holds after each."""


def commit(store: Store, round: int) -> None:
    stage(store, round)
    store.commit(round, [SERVER[round][:3], SERVER[round][3:]], {"round": round})


def stage(store: Store, round: int) -> None:
    for section, mine in ROUNDS[round].items():
        for client, state in mine.items():
            store.stage(round, section, client, state)


def held(store: Any) -> dict[str, dict[int, bytes | None]]:
    return {part: {client: store.read(part, client) for client in store.clients(part)} for part in ("client", "server")}


def round_of(store: Store) -> int:
    """Return the committed round; what the store holds must be what that round left."""
    last = store.last()
    assert last is not None
    round: int = last[1]["round"]
    assert last[0] == SERVER[round] and held(store) == AFTER[round]
    return round


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_rounds_are_committed_and_read(kind: str, tmp_path: Path) -> None:
    store: Store = MemoryStore() if kind == "memory" else DiskStore(tmp_path / "checkpoint")
    assert store.last() is None and store.read("client", 0) is None and not store.holds("client", 0)
    for round in range(4):
        commit(store, round)
        assert round_of(store) == round
    assert store.holds("server", 7) and not store.holds("server", 300) and not store.holds("client", 44)
    if kind == "disk":
        assert round_of(DiskStore(tmp_path / "checkpoint", writing=False)) == 3


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_staged_states_are_read_only_in_the_view_of_them(kind: str, tmp_path: Path) -> None:
    store: Store = MemoryStore() if kind == "memory" else DiskStore(tmp_path / "checkpoint")
    commit(store, 0)
    for round in range(1, 4):
        stage(store, round)
        assert held(store.staged()) == AFTER[round]
        assert held(store) == AFTER[round - 1]
        commit(store, round)
    store.stage(4, "client", 5, b"new")
    assert store.staged().holds("client", 5) and not store.holds("client", 5)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_discarded_states_leave_no_trace(kind: str, tmp_path: Path) -> None:
    """A round that failed is done again, and ends with other states."""
    store: Store = MemoryStore() if kind == "memory" else DiskStore(tmp_path / "checkpoint")
    commit(store, 0)
    commit(store, 1)
    before = files(tmp_path)
    for client in (0, 5):
        store.stage(2, "client", client, b"of a round that failed")
    store.discard()
    assert files(tmp_path) == before and held(store.staged()) == AFTER[1]
    commit(store, 2)
    assert round_of(store) == 2 and (kind == "memory" or round_of(DiskStore(tmp_path / "checkpoint")) == 2)


# Crashes.


class Crash(BaseException):
    """Stands for the end of the process, or of the machine."""


CALLS = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "link")


@contextmanager
def crashing(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Crash before the given call to the file system; a file that is not synced by then has lost half of its bytes."""
    left = [step]

    def patched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if left[0] == 0:
                if name == "fsync" and stat.S_ISREG(os.fstat(arguments[0]).st_mode):
                    os.ftruncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
                raise Crash
            left[0] -= 1
            return call(*arguments, **options)

        return counted

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, patched(name, getattr(os, name)))
        yield


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_a_commit_survives_a_crash_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 2 is there completely or not at all, and the run goes on as if nothing had happened."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # the machine stays up, so waiting for the disk shows nothing
    whole = DiskStore(tmp_path / "whole" / "checkpoint", keep=[2])
    for round in range(4):
        commit(whole, round)
    reached = []
    for step in range(1000):
        directory = tmp_path / f"{step}" / "checkpoint"
        store = DiskStore(directory, keep=[2])
        commit(store, 0)
        commit(store, 1)
        try:
            with crashing(step, monkeypatch):
                commit(store, 2)
        except Crash:
            reached.append(round_of(DiskStore(directory, writing=False)))
            store = DiskStore(directory, keep=[2])
            assert round_of(store) == reached[-1], "repairing it must not lose anything"
            for round in range(reached[-1] + 1, 4):
                commit(store, round)
            assert round_of(store) == 3
            assert files(directory.parent) == files(tmp_path / "whole")
            assert round_of(DiskStore(directory.parent / "kept" / "round-2", writing=False)) == 2
        else:
            break
    assert reached == sorted(reached) and set(reached) == {1, 2} and len(reached) > 10


def test_a_reader_of_a_crashed_store_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path)
    commit(store, 0)
    with pytest.raises(Crash), crashing(3, monkeypatch):
        commit(store, 1)
    before = files(tmp_path)
    assert round_of(DiskStore(tmp_path, writing=False)) == 0
    assert files(tmp_path) == before != files(DiskStore(tmp_path).directory)


def test_strangers_files_in_a_checkpoint_do_no_harm(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    commit(store, 1)
    folder = next((tmp_path / "client").iterdir())
    (folder / ".DS_Store").touch()
    (folder / "notes.txt").touch()
    store = DiskStore(tmp_path)
    assert round_of(store) == 1
    commit(store, 2)
    assert round_of(DiskStore(tmp_path)) == 2


# Damage.


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("round-1/server.safetensors", b"\x10", r"server\.safetensors is damaged .*: restore it from a backup"),
        ("round-1/info.json", b'{"round": 1', r"info\.json is damaged"),
        ("current", b"round-9", "round-9/server.safetensors"),
        ("current", b"", "current is damaged .expected the name of a round, got ''"),
        ("current", b"../../other", "current is damaged"),
    ],
)
def test_damaged_files_of_a_checkpoint_are_named(file: str, content: bytes, message: str, tmp_path: Path) -> None:
    commit(DiskStore(tmp_path), 1)
    (tmp_path / file).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        DiskStore(tmp_path)


# The journal.


@given(events=st.lists(st.dictionaries(st.sampled_from("ab"), st.integers(0, 9)), max_size=5), data=st.data())
@settings(max_examples=10)
def test_a_journal_is_cut_to_its_first_events(events: list[dict[str, int]], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(events)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        journal = Journal(path)
        for event in events:
            journal.append(event)
        with path.open("a") as file:
            file.write('{"event": "half a li')
        again = Journal(path)
        again.cut(count)
        assert again.events == events[:count]
        again.append({"last": 1})
        assert [json.loads(line) for line in path.read_text().splitlines()] == [*events[:count], {"last": 1}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"event": "start"}\n', r"metrics\.jsonl holds 1 events, but 2 were committed; restore it from a backup"),
        (b"half a li\nne\n", r"metrics\.jsonl is damaged .line 1 is not JSON"),
    ],
)
def test_a_damaged_journal_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Journal(path).cut(2)
    assert path.read_bytes() == content or "holds 1 events" in message


def test_killed_while_the_journal_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Carrying on cuts what was written after the last commit; ending there must not lose what was committed."""
    run("fedavg", rounds=2, directory=tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "half a li')

    class Ended(Exception):
        pass

    def end(*_: object) -> None:
        raise Ended

    for moment in ("truncate", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(f"fedfactor.server.store.os.{moment}", end)
            with pytest.raises(Ended):
                run("fedavg", rounds=3, directory=tmp_path)
    assert outcome(run("fedavg", rounds=3, directory=tmp_path)) == outcome(run("fedavg", rounds=3))


# Hashes, and full disks.

STATES = {"client": {1: b"one", 257: b"two"}, "server": {1: b"three"}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    store = DiskStore(tmp_path)
    commit_states(store, 0, STATES, b"start", {"round": 0})
    commit_states(store, 1, {"client": {1: b"new"}}, b"weights", {"round": 1})
    return tmp_path


def test_a_round_can_be_committed_again(directory: Path) -> None:
    for data in (b"new", b"newer"):
        commit_states(DiskStore(directory), 1, {"client": {1: data}}, b"weights", {"round": 1})
        assert DiskStore(directory).read("client", 1) == data


def test_a_state_is_verified_when_it_is_read_and_not_before(directory: Path) -> None:
    (path,) = directory.glob("client/*/257.*")
    path.write_bytes(b"twO")
    store = DiskStore(directory)
    assert store.read("client", 1) == b"new"
    with pytest.raises(Damaged, match=rf"{path} is damaged \(its SHA-256 is not the one in its name\)"):
        store.read("client", 257)


def test_a_state_that_is_missing_is_not_a_client_without_one(directory: Path) -> None:
    next(directory.glob("client/*/257.*")).unlink()
    with pytest.raises(FileNotFoundError, match="has 2 of the 3 client states that round 1 committed: restore"):
        DiskStore(directory)


def test_a_checkpoint_without_a_hash_is_refused(directory: Path) -> None:
    info = directory / "round-1" / "info.json"
    for other in ({"round": 1, "version": 1}, [], 3):
        info.write_text(json.dumps(other))
        with pytest.raises(Damaged, match=r"info\.json is damaged \(it has no SHA-256; earlier versions"):
            DiskStore(directory)


@pytest.mark.parametrize("name", ["round-1/info.json", "round-1/server.safetensors", "current"])
def test_no_byte_of_a_checkpoint_can_change(name: str, directory: Path) -> None:
    path = directory / name
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises((Damaged, FileNotFoundError), match=r"damaged|No such file"):
            DiskStore(directory, writing=False)


def test_a_journal_on_a_full_disk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        Journal(path).append({"event": "start"})
