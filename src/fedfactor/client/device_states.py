"""Private states on a client's own disk."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from fedfactor.protocol.files import sync, write_file
from fedfactor.protocol.message import Bytes
from fedfactor.protocol.states import SHA256


class Lost(LookupError):
    """A device does not have the state that a job builds on."""


class DeviceStates:
    """One client's states of one run in a directory of its own: files `VERSION.SHA256`, whole or not there at all.

    A version is the number of rounds that are done once the state is accepted.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, sha256: str) -> bytes:
        """Return the state of this hash."""
        found = [path for path, _, name in self._files() if name == sha256]
        if not found:
            there = ", ".join(f"{name[:12]}... of round {version}" for _, version, name in self._files()) or "none"
            raise Lost(
                f"the private state {sha256[:12]}... is not in {self.directory} on this device; there are {there}"
            )
        state = found[0].read_bytes()
        if hashlib.sha256(state).hexdigest() != sha256:
            raise Lost(f"{found[0]} is damaged: its contents are not what its name says; restore it from a copy")
        return state

    def write(self, version: int, state: Bytes) -> str:
        """Put a new state beside the others and return its hash, once the disk has it."""
        sha256 = hashlib.sha256(state).hexdigest()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = self.directory / f"new.{os.getpid()}"
        write_file(unfinished, state)
        unfinished.replace(self.directory / f"{version}.{sha256}")
        sync(self.directory)
        return sha256

    def settle(self, sha256: str | None, round: int) -> None:
        """Remove what no job can ask for again, now that a job of a round names the state it builds on.

        That state is committed. Older ones are overtaken, and newer ones up to this round were not accepted. States of
        later rounds stay: this job may be one that came late.
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
