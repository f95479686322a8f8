"""Private states that stay on the client's own device, and the receipts that the server keeps of them.

Where clients are machines of their own, the server never sees what they keep. A device writes its new state to its
own disk and then answers; with the answer goes the state's SHA-256. The server commits this receipt together with the
round, and every later job names the state it builds on by it. So a round that was never committed leaves nothing
behind: whoever is asked again starts from the state before, however often the server, the client or the network were
killed.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from fedfactor.store import sync, write_file
from fedfactor.wire import Bytes

RECEIPT = b"receipt:"
"""How a receipt begins. A state cannot: its first eight bytes are the length of its header."""
SHA256 = re.compile(r"[0-9a-f]{64}")


class Elsewhere(LookupError):
    """A state that is asked for here is on its client's device."""


class Lost(LookupError):
    """A device does not have the state that a job builds on."""


def receipt(sha256: str) -> bytes:
    """Write what the server keeps in place of a state."""
    if not SHA256.fullmatch(sha256):
        raise ValueError(f"a SHA-256 has 64 hexadecimal digits, got {sha256[:80]!r}")
    return RECEIPT + sha256.encode()


def receipt_sha256(state: Bytes) -> str | None:
    """Read a receipt; `None` for a state itself."""
    return bytes(state[len(RECEIPT) :]).decode() if bytes(state[: len(RECEIPT)]) == RECEIPT else None


def state_sha256(state: Bytes) -> str:
    """Hash a state; a receipt has the hash of what it stands for."""
    return receipt_sha256(state) or hashlib.sha256(state).hexdigest()


def at_hand(state: Bytes) -> Bytes:
    """Return a state, or say that only its receipt is here."""
    sha256 = receipt_sha256(state)
    if sha256 is not None:
        raise Elsewhere(
            f"the private state is on the client's own device; here is only its SHA-256, {sha256[:12]}...: ask there, "
            "or carry the run on with the engine it was started with"
        )
    return state


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
