"""Private states that stay on the client's own device, and the receipts that the server keeps of them.

If clients run on their own machines, the server never sees their states. A device writes its new state to its own disk,
then replies; the reply contains the SHA-256 of the state. The server commits this receipt together with the round, and
each later job names the state to start from by its receipt. A round that was never committed has therefore no effect:
when a client is asked again, it starts from the previous state, however often server, client or network failed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from fedfactor.protocol.message import Bytes, Message, decode, encode
from fedfactor.protocol.plan import Tensors

RECEIPT = b"receipt:"
"""The first bytes of a receipt. A state cannot begin like this: its first eight bytes are its header's length."""
SHA256 = re.compile(r"[0-9a-f]{64}")


class Elsewhere(LookupError):
    """The requested state is on the client's device."""


def receipt(sha256: str) -> bytes:
    """Return the receipt that the server keeps instead of a state. Raise ValueError if it is not a SHA-256."""
    if not SHA256.fullmatch(sha256):
        raise ValueError(f"a SHA-256 has 64 hexadecimal digits, got {sha256[:80]!r}")
    return RECEIPT + sha256.encode()


def receipt_sha256(state: Bytes) -> str | None:
    """Return the SHA-256 in a receipt, or `None` if it is a state."""
    return bytes(state[len(RECEIPT) :]).decode() if bytes(state[: len(RECEIPT)]) == RECEIPT else None


def state_sha256(state: Bytes) -> str:
    """Return the SHA-256 of a state, given the state or its receipt."""
    return receipt_sha256(state) or hashlib.sha256(state).hexdigest()


def at_hand(state: Bytes) -> Bytes:
    """Return a state. Raise Elsewhere if only its receipt is here."""
    sha256 = receipt_sha256(state)
    if sha256 is not None:
        raise Elsewhere(
            f"the private state is on the client's own device; only its SHA-256 is here, {sha256[:12]}...: export the "
            "model there, or resume the run with the engine that started it"
        )
    return state


class States(Protocol):
    """The read-only part of a store."""

    def read(self, section: str, client: int) -> bytes | None:
        """Return the state of a client, or `None`."""
        ...

    def holds(self, section: str, client: int) -> bool:
        """Return whether a client has a state."""
        ...

    def version(self, section: str, client: int) -> int:
        """Return the round, counted from 1, that wrote the state of a client; 0 if it has none."""
        ...

    def clients(self, section: str) -> list[int]:
        """Return all clients with a state, in ascending order."""
        ...


Computed = TypeVar("Computed")


class HeldTensors(Mapping[int, Tensors]):
    """Read-only view of one section of a store, as tensors by client; a client's are read on first access.

    It lives for one round, so that a method that compares all clients with each other reads each only once.
    """

    def __init__(self, store: States, section: str) -> None:
        self._store, self._section = store, section
        self._read: dict[int, Tensors] = {}
        self._computed: dict[object, Any] = {}

    def once(self, compute: Callable[[Mapping[int, Tensors]], Computed]) -> Computed:
        """Return `compute` of all clients; it is computed once."""
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        found: Computed = self._computed[compute]
        return found

    def __getitem__(self, client: int) -> Tensors:
        if client not in self._read:
            data = self._store.read(self._section, client)
            if data is None:
                raise KeyError(client)
            self._read[client] = decode(data).tensors
        return self._read[client]

    def __contains__(self, client: object) -> bool:
        return isinstance(client, int) and self._store.holds(self._section, client)

    def __iter__(self) -> Iterator[int]:
        return iter(self._store.clients(self._section))

    def __len__(self) -> int:
        return len(self._store.clients(self._section))


def pack(tensors: Tensors) -> Bytes:
    """Encode tensors as bytes for a store."""
    return encode(Message("state", {}, tensors))
