"""Private states that stay on the client's own device, and the receipts that the server keeps of them.

Where clients are machines of their own, the server never sees what they keep. A device writes its new state to its
own disk and then answers; with the answer goes the state's SHA-256. The server commits this receipt together with the
round, and every later job names the state it builds on by it. So a round that was never committed leaves nothing
behind: whoever is asked again starts from the state before, however often the server, the client or the network were
killed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from fedfactor.protocol.message import Bytes, Message, decode, encode
from fedfactor.protocol.plan import Tensors

RECEIPT = b"receipt:"
"""How a receipt begins. A state cannot: its first eight bytes are the length of its header."""
SHA256 = re.compile(r"[0-9a-f]{64}")


class Elsewhere(LookupError):
    """A state that is asked for here is on its client's device."""


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


class States(Protocol):
    """The part of a store that is read."""

    def read(self, section: str, client: int) -> bytes | None:
        """Return the state of a client, or `None`."""
        ...

    def holds(self, section: str, client: int) -> bool:
        """Tell whether a client has a state."""
        ...

    def clients(self, section: str) -> list[int]:
        """Return all clients with a state, in ascending order."""
        ...


Computed = TypeVar("Computed")


class HeldTensors(Mapping[int, Tensors]):
    """Read-only view of one section of a store as tensors by client, read from disk when first asked for.

    Lives for one round, so that a method that compares all clients with each other reads each only once.
    """

    def __init__(self, store: States, section: str) -> None:
        self._store, self._section = store, section
        self._read: dict[int, Tensors] = {}
        self._computed: dict[object, Any] = {}

    def once(self, compute: Callable[[Mapping[int, Tensors]], Computed]) -> Computed:
        """Compute something of all clients when it is first asked for."""
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
    """Write tensors as the bytes a store keeps."""
    return encode(Message("state", {}, tensors))
