"""Stores of a run: the server's checkpoint and the clients' states, committed together or not at all.

Client states are files named by client, version and SHA-256. A version is valid only if the checkpoint's round is at
least as high. So a process killed at any moment leaves either the old round or the new one, never a mixture. The
checkpoint records its own SHA-256. A file is verified whenever it is read: client states one by one, not at opening.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedfactor.protocol.message import Bytes
from fedfactor.protocol.states import States
from fedfactor.support.files import sync, write_file, write_text

Changes = Mapping[str, Mapping[int, Bytes]]
"""New states, by section and client."""


class Damaged(ValueError):
    """A file of a run is not what was written; the message names it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged ({reason}): restore it from a backup, or start again in another directory")


class Store(States, Protocol):
    """Client states by section and client, and the server's last commit."""

    def commit(self, version: int, states: Changes, server: Bytes, info: dict[str, Any]) -> None:
        """Commit a round atomically: the changed client states, the server's bytes and its info."""
        ...

    def last(self) -> tuple[bytes, dict[str, Any]] | None:
        """Return the last committed server bytes and info, or `None` before the first commit."""
        ...


@dataclass(frozen=True)
class Overlay:
    """A read-only view of a store as if some changes were committed."""

    store: States
    changes: Changes

    def read(self, section: str, client: int) -> bytes | None:
        """Return the new state of a client, or its old one."""
        new = self.changes.get(section, {}).get(client)
        return self.store.read(section, client) if new is None else bytes(new)

    def holds(self, section: str, client: int) -> bool:
        """Return whether a client has a new or an old state."""
        return client in self.changes.get(section, {}) or self.store.holds(section, client)

    def clients(self, section: str) -> list[int]:
        """Return all clients with a state."""
        return sorted({*self.changes.get(section, {}), *self.store.clients(section)})


class MemoryStore:
    """A store in memory, for runs without a directory."""

    def __init__(self) -> None:
        self._states: dict[str, dict[int, bytes]] = {}
        self._last: tuple[bytes, dict[str, Any]] | None = None

    def read(self, section: str, client: int) -> bytes | None:
        """Return the state of a client, or `None`."""
        return self._states.get(section, {}).get(client)

    def holds(self, section: str, client: int) -> bool:
        """Return whether a client has a state."""
        return client in self._states.get(section, {})

    def clients(self, section: str) -> list[int]:
        """Return all clients with a state."""
        return sorted(self._states.get(section, {}))

    def commit(self, version: int, states: Changes, server: Bytes, info: dict[str, Any]) -> None:
        """Store the changes of a round."""
        for section, mine in states.items():
            kept = {client: bytes(state) for client, state in mine.items()}  # copies that cannot change
            self._states.setdefault(section, {}).update(kept)
        self._last = bytes(server), info

    def last(self) -> tuple[bytes, dict[str, Any]] | None:
        """Return the last commit."""
        return self._last


class DiskStore:
    """A store in a directory: `current`, which names `round-N`, and below it one file per client state.

    `round-N/server.safetensors` and `round-N/info.json` are the checkpoint, and `SECTION/xx/CLIENT.N.SHA256` a state.
    """

    def __init__(self, directory: Path, keep: Collection[int] = (), *, writing: bool = True) -> None:
        self.directory = directory
        self.keep = keep
        if writing:
            directory.mkdir(parents=True, exist_ok=True)
        last = self.last()
        info = last[1] if last else {"version": -1, "states": 0}
        self._names: dict[tuple[str, int], str] = {}
        found = [(match, path) for path in directory.glob("*/*/*.*") if (match := STATE.fullmatch(path.name))]
        for match, path in sorted(found, key=lambda file: int(file[0]["version"])):
            key = path.parent.parent.name, int(match["client"])
            stale: Path | None = path  # from a round that was never committed
            if int(match["version"]) <= info["version"]:
                stale = self._path(*key, self._names[key]) if key in self._names else None  # replaced by this version
                self._names[key] = path.name
            if writing and stale is not None:
                stale.unlink()
        if len(self._names) != info["states"]:
            raise FileNotFoundError(
                f"{directory} has {len(self._names)} of the {info['states']} client states that round "
                f"{info['version']} committed: restore the missing files from a backup"
            )
        if writing and info["version"] in keep:  # the process was killed between commit and copy
            self._keep(info["version"])

    def _path(self, section: str, client: int, name: str) -> Path:
        return self.directory / section / f"{client % 256:02x}" / name

    def read(self, section: str, client: int) -> bytes | None:
        """Return the committed state of a client, or `None`. Raise Damaged if it is not what was committed."""
        name = self._names.get((section, client))
        if name is None:
            return None
        path = self._path(section, client, name)
        state = path.read_bytes()
        if _sha256(state) != name.rpartition(".")[2]:
            raise Damaged(path, "its SHA-256 is not the one in its name")
        return state

    def holds(self, section: str, client: int) -> bool:
        """Return whether a client has a committed state."""
        return (section, client) in self._names

    def clients(self, section: str) -> list[int]:
        """Return all clients with a committed state."""
        return sorted(client for name, client in self._names if name == section)

    def commit(self, version: int, states: Changes, server: Bytes, info: dict[str, Any]) -> None:
        """Write the new files, then the pointer that makes them valid; then remove the old files."""
        new = {}
        for section, mine in states.items():
            for client, data in mine.items():
                new[section, client] = name = f"{client}.{version}.{_sha256(data)}"
                path = self._path(section, client, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, data)
        folder = self.directory / f"round-{version}"
        folder.mkdir(exist_ok=True)
        write_file(folder / "server.safetensors", server)
        info = {**info, "version": version, "states": len(self._names | new), "server_sha256": _sha256(server)}
        write_file(folder / "info.json", json.dumps({**info, "info_sha256": _info_sha256(info)}).encode())
        pointer = self.directory / "current.new"
        write_file(pointer, folder.name.encode())
        pointer.replace(self.directory / "current")
        sync(self.directory)  # before the old files are removed
        for key, name in new.items():
            if self._names.get(key, name) != name:
                self._path(*key, self._names[key]).unlink(missing_ok=True)
        self._names |= new
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
        for key, name in self._names.items():
            path = self._path(*key, name)
            target = unfinished / path.relative_to(self.directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(path, target)
        write_text(unfinished / "current", f"round-{version}")
        unfinished.rename(aside)

    def last(self) -> tuple[bytes, dict[str, Any]] | None:
        """Return the last commit. Raise Damaged if a file is not what was committed."""
        return read_checkpoint(self.directory)


STATE = re.compile(r"(?P<client>\d+)\.(?P<version>\d+)\.[0-9a-f]{64}")
"""The name of a client state."""


def last_version(directory: Path) -> int:
    """Return the version of the last commit in the directory of a store; -1 before the first commit."""
    pointer = directory / "current"
    if not pointer.exists():
        return -1
    name = pointer.read_bytes().decode(errors="replace")
    if not name.removeprefix("round-").isdigit():
        raise Damaged(pointer, f"expected the name of a round, got {name[:40]!r}")
    return int(name.removeprefix("round-"))


def read_checkpoint(directory: Path) -> tuple[bytes, dict[str, Any]] | None:
    """Return the last commit in the directory of a store, verified, or `None` before the first commit."""
    version = last_version(directory)
    if version < 0:
        return None
    folder = directory / f"round-{version}"
    server, path = folder / "server.safetensors", folder / "info.json"
    data, text = server.read_bytes(), path.read_bytes()
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


def _sha256(data: Bytes) -> str:
    return hashlib.sha256(data).hexdigest()


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
            write_file(self.path, (json.dumps(event) + "\n").encode(), "ab")  # on disk: a commit relies on it

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
