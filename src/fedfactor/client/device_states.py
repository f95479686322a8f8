"""Private states on the disk of a client's device."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from fedfactor.protocol.message import Bytes
from fedfactor.protocol.states import SHA256
from fedfactor.support.files import sync, write_file


class Lost(LookupError):
    """The device does not have the state that a job starts from."""


class DeviceStates:
    """The states of one client in one run, as files `VERSION.SHA256` in their own directory, written atomically.

    A version is the number of finished rounds once the state is accepted.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, sha256: str) -> bytes:
        """Return the state with this hash. Raise Lost if it is missing or damaged."""
        found = [path for path, _, name in self._files() if name == sha256]
        if not found:
            there = ", ".join(f"{name[:12]}... of round {version}" for _, version, name in self._files()) or "none"
            raise Lost(
                f"the private state {sha256[:12]}... is not in {self.directory} on this device; there are {there}"
            )
        state = found[0].read_bytes()
        if hashlib.sha256(state).hexdigest() != sha256:
            raise Lost(f"{found[0]} is damaged: its SHA-256 is not the one in its name; restore it from a backup")
        return state

    def write(self, version: int, state: Bytes) -> str:
        """Write a new state, keep the others, and return its hash once it is on disk."""
        sha256 = hashlib.sha256(state).hexdigest()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = self.directory / f"new.{os.getpid()}"
        write_file(unfinished, state)
        unfinished.replace(self.directory / f"{version}.{sha256}")
        sync(self.directory)
        return sha256

    def settle(self, sha256: str | None, round: int) -> None:
        """Remove the states that no later job can need, given the state that a job of this round starts from.

        That state is committed. Older states are outdated, and newer ones up to this round were not accepted. States of
        later rounds are kept, because this job may have been delayed.
        """
        for path, version, name in self._files():
            if version <= round and name != sha256:
                path.unlink(missing_ok=True)

    def _files(self) -> list[tuple[Path, int, str]]:
        found = []
        for path in self.directory.glob("*.*"):
            version, _, name = path.name.partition(".")
            if version.isdigit() and SHA256.fullmatch(name):
                found.append((path, int(version), name))
        return sorted(found, key=lambda file: file[1])
