"""Stores of a run: the server's checkpoint and the clients' states, committed together or not at all.

Client states are files named by client, version and SHA-256. A version is valid only if the checkpoint's round is at
least as high. So a process killed at any moment leaves either the old round or the new one, never a mixture. The
checkpoint records its own SHA-256. A file is verified whenever it is read: client states one by one, not at opening.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
from collections import ChainMap
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from fedfactor.protocol.message import Bytes
from fedfactor.protocol.states import States
from fedfactor.support.files import sync, write_file, write_text


class Damaged(ValueError):
    """A file of a run is not what was written; the message names it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged ({reason}): restore it from a backup, or start again in another directory")


class Store(States, Protocol):
    """Client states by section and client, and the server's last commit."""

    @property
    def scratch(self) -> Path | None:
        """Directory for temporary files; `None`: the system's."""
        ...

    def stage(self, version: int, section: str, client: int, state: Bytes) -> None:
        """Write a state of a round that is under way. It counts when this version is committed, and not before."""
        ...

    def discard(self) -> None:
        """Remove staged states: their round is not committed, or starts again."""
        ...

    def staged(self) -> States:
        """Return a view of the store as if the staged states were committed."""
        ...

    def commit(self, version: int, server: Sequence[Bytes], info: dict[str, Any]) -> None:
        """Commit a round atomically: the staged client states, the server's bytes, in parts, and its info."""
        ...

    def last(self) -> tuple[Bytes, dict[str, Any]] | None:
        """Return the last committed server bytes and info, or `None` before the first commit."""
        ...


class MemoryStore:
    """A store in memory, for runs without a directory."""

    scratch: Path | None = None

    def __init__(self) -> None:
        self._states: dict[str, dict[int, tuple[int, bytes]]] = {}
        self._staged: dict[str, dict[int, tuple[int, bytes]]] = {}
        self._last: tuple[Bytes, dict[str, Any]] | None = None

    def read(self, section: str, client: int) -> bytes | None:
        """Return the state of a client, or `None`."""
        return self._states.get(section, {}).get(client, (0, None))[1]

    def version(self, section: str, client: int) -> int:
        """Return the round that wrote the state of a client; 0 if it has none."""
        return self._states.get(section, {}).get(client, (0, None))[0]

    def holds(self, section: str, client: int) -> bool:
        """Return whether a client has a state."""
        return client in self._states.get(section, {})

    def clients(self, section: str) -> list[int]:
        """Return all clients with a state."""
        return sorted(self._states.get(section, {}))

    def stage(self, version: int, section: str, client: int, state: Bytes) -> None:
        """Keep a copy of a state, which cannot change."""
        self._staged.setdefault(section, {})[client] = version, bytes(state)

    def discard(self) -> None:
        """Remove staged states."""
        self._staged = {}

    def staged(self) -> States:
        """Return a view of the store as if the staged states were committed."""
        view = MemoryStore()
        view._states = {
            section: self._states.get(section, {}) | self._staged.get(section, {})
            for section in self._states.keys() | self._staged.keys()
        }
        return view

    def commit(self, version: int, server: Sequence[Bytes], info: dict[str, Any]) -> None:
        """Add the staged states of a round."""
        for section, mine in self._staged.items():
            self._states.setdefault(section, {}).update(mine)
        self._staged, self._last = {}, (b"".join(server), info)

    def last(self) -> tuple[Bytes, dict[str, Any]] | None:
        """Return the last commit."""
        return self._last


class DiskStore:
    """A store in a directory: `current`, which names `round-N`, and below it one file per client state.

    `round-N/server.safetensors` and `round-N/info.json` are the checkpoint, and `SECTION/xx/CLIENT.N.SHA256` a state.
    """

    def __init__(self, directory: Path, keep: Collection[int] = (), *, writing: bool = True) -> None:
        self.directory = self.scratch = directory
        self.keep = keep
        if writing:
            directory.mkdir(parents=True, exist_ok=True)
        last = self.last()
        info = last[1] if last else {"version": -1, "states": 0}
        self._index: dict[str, MutableMapping[int, bytes]] = {}
        self._staged: dict[str, dict[int, bytes]] = {}
        stale: list[tuple[str, int, bytes]] = []
        for section, client, entry in _states_in(directory):
            mine = self._index.setdefault(section, {})
            if _version(entry) > info["version"]:  # from a round that was never committed
                stale.append((section, client, entry))
                continue
            old = mine.get(client, entry)
            mine[client] = max(old, entry)
            if old != entry:  # replaced by a later version
                stale.append((section, client, min(old, entry)))
        for section, client, entry in stale if writing else ():
            self._path(section, client, entry).unlink()
        count = sum(map(len, self._index.values()))
        if count != info["states"]:
            raise FileNotFoundError(
                f"{directory} has {count} of the {info['states']} client states that round "
                f"{info['version']} committed: restore the missing files from a backup"
            )
        if writing and info["version"] in keep:  # the process was killed between commit and copy
            self._keep(info["version"])

    def _path(self, section: str, client: int, entry: bytes) -> Path:
        name = f"{client}.{_version(entry)}.{entry[VERSION_BYTES:].hex()}"
        return self.directory / section / f"{client % 256:02x}" / name

    def read(self, section: str, client: int) -> bytes | None:
        """Return the committed state of a client, or `None`. Raise Damaged if it is not what was committed."""
        entry = self._index.get(section, {}).get(client)
        if entry is None:
            return None
        path = self._path(section, client, entry)
        state = path.read_bytes()
        if hashlib.sha256(state).digest() != entry[VERSION_BYTES:]:
            raise Damaged(path, "its SHA-256 is not the one in its name")
        return state

    def version(self, section: str, client: int) -> int:
        """Return the round that wrote the committed state of a client; 0 if it has none."""
        return _version(self._index.get(section, {}).get(client, b""))

    def holds(self, section: str, client: int) -> bool:
        """Return whether a client has a committed state."""
        return client in self._index.get(section, {})

    def clients(self, section: str) -> list[int]:
        """Return all clients with a committed state."""
        return sorted(self._index.get(section, {}))

    def stage(self, version: int, section: str, client: int, state: Bytes) -> None:
        """Write a file that counts when this version is committed; if it never is, opening the store removes it."""
        entry = version.to_bytes(VERSION_BYTES) + hashlib.sha256(state).digest()
        path = self._path(section, client, entry)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, state)
        self._staged.setdefault(section, {})[client] = entry

    def discard(self) -> None:
        """Remove the files of staged states."""
        for section, mine in self._staged.items():
            for client, entry in mine.items():
                if entry != self._index.get(section, {}).get(client):
                    self._path(section, client, entry).unlink(missing_ok=True)
        self._staged = {}

    def staged(self) -> States:
        """Return a view of the store as if the staged states were committed."""
        view = copy.copy(self)
        view._index = dict(self._index)
        for section, mine in self._staged.items():
            view._index[section] = ChainMap(mine, self._index.get(section, {}))
        return view

    def commit(self, version: int, server: Sequence[Bytes], info: dict[str, Any]) -> None:
        """Write the checkpoint, then the pointer that makes it and the staged states valid; then remove old files."""
        folder = self.directory / f"round-{version}"
        folder.mkdir(exist_ok=True)
        with ThreadPoolExecutor(1) as hashing:  # while the disk writes
            sha256 = hashing.submit(_sha256, *server)
            write_file(folder / "server.safetensors", *server)
        known = {section: self._index.get(section, {}) for section in self._index.keys() | self._staged.keys()}
        new = sum(len(mine.keys() - known[section].keys()) for section, mine in self._staged.items())
        states = sum(map(len, known.values())) + new
        info = {**info, "version": version, "states": states, "server_sha256": sha256.result()}
        write_file(folder / "info.json", json.dumps({**info, "info_sha256": _info_sha256(info)}).encode())
        pointer = self.directory / "current.new"
        write_file(pointer, folder.name.encode())
        pointer.replace(self.directory / "current")
        sync(self.directory)  # before the old files are removed
        for section, mine in self._staged.items():
            for client, entry in mine.items():
                old = self._index.setdefault(section, {}).get(client, entry)
                self._index[section][client] = entry
                if old != entry:
                    self._path(section, client, old).unlink(missing_ok=True)
        self._staged = {}
        for other in self.directory.glob("round-*"):
            if other != folder:
                shutil.rmtree(other)
        if version in self.keep:
            self._keep(version)

    def _keep(self, version: int) -> None:
        """Copy this round to `kept/`, with all client states, as hard links: committed files never change."""
        aside = self.directory.parent / "kept" / f"round-{version}"
        if aside.exists():
            return
        unfinished = aside.with_suffix(".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(self.directory / f"round-{version}", unfinished / f"round-{version}", copy_function=_link)
        for section, mine in self._index.items():
            for client, entry in mine.items():
                path = self._path(section, client, entry)
                target = unfinished / path.relative_to(self.directory)
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(path, target)
        write_text(unfinished / "current", f"round-{version}")
        unfinished.rename(aside)

    def last(self) -> tuple[Bytes, dict[str, Any]] | None:
        """Return the last commit. Raise Damaged if a file is not what was committed."""
        return read_checkpoint(self.directory)


STATE = re.compile(r"(\d+)\.(\d+)\.([0-9a-f]{64})")
"""The name of a client state: client, version and SHA-256."""
VERSION_BYTES = 4
"""Length of the version at the start of an entry of the index; the SHA-256 follows. Later versions are greater."""


def _version(entry: bytes) -> int:
    return int.from_bytes(entry[:VERSION_BYTES])


def _states_in(directory: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield section, client and index entry of each state file; other files are ignored."""
    for section in _folders(directory):
        for folder in _folders(section):
            with os.scandir(folder) as files:
                for file in files:
                    if match := STATE.fullmatch(file.name):
                        client, version, sha256 = match.groups()
                        entry = int(version).to_bytes(VERSION_BYTES) + bytes.fromhex(sha256)
                        yield section.name, int(client), entry


def _folders(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir()] if directory.exists() else []


def last_version(directory: Path) -> int:
    """Return the version of the last commit in the directory of a store; -1 before the first commit."""
    pointer = directory / "current"
    if not pointer.exists():
        return -1
    name = pointer.read_bytes().decode(errors="replace")
    if not name.removeprefix("round-").isdigit():
        raise Damaged(pointer, f"expected the name of a round, got {name[:40]!r}")
    return int(name.removeprefix("round-"))


def _read(path: Path) -> bytearray:
    """Return the content of a file, writable, so that decoding it needs no further copy."""
    with path.open("rb", buffering=0) as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        view = memoryview(data)
        while count := file.readinto(view):  # one call reads at most two gigabytes
            view = view[count:]
    return data


def read_checkpoint(directory: Path) -> tuple[Bytes, dict[str, Any]] | None:
    """Return the last commit in the directory of a store, verified, or `None` before the first commit."""
    version = last_version(directory)
    if version < 0:
        return None
    folder = directory / f"round-{version}"
    server, path = folder / "server.safetensors", folder / "info.json"
    data, text = _read(server), path.read_bytes()
    try:
        info = json.loads(text)
    except ValueError as error:
        raise Damaged(path, str(error)) from None
    if not isinstance(info, dict) or "info_sha256" not in info:
        raise Damaged(path, "it has no SHA-256; earlier versions of fedfactor wrote none")
    if info.pop("info_sha256") != _info_sha256(info):
        raise Damaged(path, "its SHA-256 is not the one that it records")
    if _sha256(data) != info["server_sha256"]:
        raise Damaged(server, f"its SHA-256 is not the one in {path.name}")
    return data, info


def _sha256(*parts: Bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _info_sha256(info: dict[str, Any]) -> str:
    return _sha256(json.dumps(info).encode())


def _link(source: str | Path, target: str | Path) -> None:
    """Create a hard link, or copy the file if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


class Journal:
    """The events of a run, in memory and, with a path, in an append-only file with one JSON object per line."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = []

    def append(self, event: dict[str, Any]) -> None:
        """Add an event."""
        self.events.append(event)
        if self.path is not None:
            write_file(self.path, (json.dumps(event) + "\n").encode(), mode="ab")  # on disk: a commit relies on it

    def cut(self, count: int) -> None:
        """Read the first `count` events, and remove those that a killed process wrote after its last commit.

        Raise ValueError if there are fewer, or one is damaged.
        """
        if self.path is not None:
            lines = self.path.read_bytes().splitlines(keepends=True)[:count] if self.path.exists() else []
            self.events = [self._event(number, line) for number, line in enumerate(lines, 1)]
            if self.path.exists():
                os.truncate(self.path, sum(map(len, lines)))
        if len(self.events) != count:
            raise ValueError(
                f"{self.path} holds {len(self.events)} events, but {count} were committed; restore it from a backup"
            )

    def _event(self, number: int, line: bytes) -> dict[str, Any]:
        assert self.path is not None
        try:
            event: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise Damaged(self.path, f"line {number} is not JSON: {error}") from None
        return event
