"""Stores of a run: the server's checkpoint and the clients' states, committed together or not at all.

Client states are files named by client and version. A version is valid only if the checkpoint's round is at least as
high. So a process killed at any moment leaves either the old round or the new one, never a mixture.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedfactor.protocol.files import sync, write_file
from fedfactor.protocol.message import BadMessage, Bytes, decode
from fedfactor.protocol.states import States

Changes = Mapping[str, Mapping[int, Bytes]]
"""New states, by section and client."""


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
    """A store in a directory: `round-N/server.safetensors`, `round-N/info.json`, `current`, `SECTION/xx/CLIENT.N`."""

    def __init__(self, directory: Path, keep: Collection[int] = (), *, writing: bool = True) -> None:
        self.directory = directory
        self.keep = keep
        if writing:
            directory.mkdir(parents=True, exist_ok=True)
        last = self.last()
        committed = last[1]["version"] if last else -1
        self._versions: dict[tuple[str, int], int] = {}
        ours = [path for path in directory.glob("*/*/*.*") if path.stem.isdigit() and path.suffix[1:].isdigit()]
        for path in sorted(ours, key=lambda path: int(path.suffix[1:])):
            key, version = (path.parent.parent.name, int(path.stem)), int(path.suffix[1:])
            stale = path if version > committed else None  # from a round that was never committed
            if version <= committed:
                if key in self._versions:  # replaced by a later version
                    stale = self._path(*key, self._versions[key])
                self._versions[key] = version
            if writing and stale is not None:
                stale.unlink()
        if writing and committed in keep:  # the process was killed between commit and copy
            self._keep(committed)

    def _path(self, section: str, client: int, version: int) -> Path:
        return self.directory / section / f"{client % 256:02x}" / f"{client}.{version}"

    def read(self, section: str, client: int) -> bytes | None:
        """Return the committed state of a client, or `None`."""
        version = self._versions.get((section, client))
        return None if version is None else self._path(section, client, version).read_bytes()

    def holds(self, section: str, client: int) -> bool:
        """Return whether a client has a committed state."""
        return (section, client) in self._versions

    def clients(self, section: str) -> list[int]:
        """Return all clients with a committed state."""
        return sorted(client for name, client in self._versions if name == section)

    def commit(self, version: int, states: Changes, server: Bytes, info: dict[str, Any]) -> None:
        """Write the new files, then the pointer that makes them valid; then remove the old files."""
        for section, mine in states.items():
            for client, data in mine.items():
                path = self._path(section, client, version)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, data)
        folder = self.directory / f"round-{version}"
        folder.mkdir(exist_ok=True)
        write_file(folder / "server.safetensors", server)
        write_file(folder / "info.json", json.dumps({**info, "version": version}).encode())
        pointer = self.directory / "current.new"
        write_file(pointer, folder.name.encode())
        pointer.replace(self.directory / "current")
        sync(self.directory)  # before the old files are removed
        self._forget(version, states)
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
        for (section, client), at in self._versions.items():
            path = self._path(section, client, at)
            target = unfinished / path.relative_to(self.directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(path, target)
        (unfinished / "current").write_text(f"round-{version}")
        unfinished.rename(aside)

    def _forget(self, version: int, states: Changes) -> None:
        for section, mine in states.items():
            for client in mine:
                old = self._versions.get((section, client))
                if old is not None and old != version:
                    self._path(section, client, old).unlink(missing_ok=True)
                self._versions[section, client] = version
        for folder in self.directory.glob("round-*"):
            if folder.name != f"round-{version}":
                shutil.rmtree(folder)

    def last(self) -> tuple[bytes, dict[str, Any]] | None:
        """Return the last commit."""
        pointer = self.directory / "current"
        if not pointer.exists():
            return None
        name = pointer.read_text()
        if not name.removeprefix("round-").isdigit():
            raise _damaged(pointer, f"expected the name of a round, got {name[:40]!r}")
        server, info = self.directory / name / "server.safetensors", self.directory / name / "info.json"
        data, text = server.read_bytes(), info.read_text()
        try:
            decode(data)
        except BadMessage as error:
            raise _damaged(server, str(error)) from None
        try:
            return data, json.loads(text)
        except json.JSONDecodeError as error:
            raise _damaged(info, str(error)) from None


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(f"{path} is damaged ({reason}): restore it from a backup, or start again in another directory")


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
            with self.path.open("a") as file:
                file.write(json.dumps(event) + "\n")
                file.flush()
                os.fsync(file.fileno())  # a commit relies on it

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
            raise _damaged(self.path, f"line {number} is not JSON: {error}") from None
        return event
