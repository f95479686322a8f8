"""The state of the server between rounds, and hashes that identify it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch

from fedfactor.protocol.coding import prefixed, sections
from fedfactor.protocol.message import Bytes, Encoder, decode
from fedfactor.protocol.moves import Moves
from fedfactor.protocol.optimizer import State
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.states import States, state_sha256


@dataclass(frozen=True)
class Server:
    """The state of the server after a number of rounds."""

    round: int
    tensors: Tensors
    optimizer: State
    totals: dict[str, Any] = field(default_factory=dict)
    """Sums since the first round; `None` if a figure is not known, such as operations that cannot be counted."""
    statistics: dict[float, Tensors] = field(default_factory=dict)
    """Norm statistics by capacity, if they were estimated on the clients' data in this round."""
    untrained: Tensors = field(default_factory=dict)
    """Masks of the rows (output channels) of weights that no client has held in any round; all others are trained."""
    moves: Moves = field(default_factory=Moves)
    """How far the base has moved, if the method moves it."""

    def silenced(self) -> Tensors:
        """Return the tensors for use: untrained rows are zero, so that channels of initial values are silent."""
        masks = {name: mask for name, mask in self.untrained.items() if name in self.tensors}
        return self.tensors | {
            name: self.tensors[name].masked_fill(mask.reshape(-1, *[1] * (self.tensors[name].dim() - 1)), 0)
            for name, mask in masks.items()
        }

    def to_parts(self) -> list[Bytes]:
        """Encode tensors, optimizer state, norm statistics, masks of untrained rows and moves of the base, in parts."""
        tensors = prefixed("model", self.tensors)
        for kind, own in self.optimizer.items():
            tensors |= prefixed(f"optimizer/{kind}", own)
        for level, own in self.statistics.items():
            tensors |= prefixed(f"norms/{level!r}", own)
        tensors |= prefixed("untrained", {name: mask.to(torch.uint8) for name, mask in self.untrained.items()})
        tensors |= prefixed("moved", self.moves.total)
        for at, move in self.moves.log.items():
            tensors |= prefixed(f"moves/{at}", move)
        fields = {"kinds": sorted(self.optimizer)} | ({"moves": [*self.moves.log]} if self.moves.log else {})
        return Encoder(tensors).parts("server", fields)

    @classmethod
    def from_bytes(cls, data: Bytes, info: dict[str, Any]) -> Server:
        """Decode the result of `to_parts`."""
        message = decode(data)
        found = sections(message.tensors)
        kinds = sections(found.get("optimizer", {}))
        optimizer = {kind: kinds.get(kind, {}) for kind in message.fields["kinds"]}
        statistics = {float(level): tensors for level, tensors in sections(found.get("norms", {})).items()}
        untrained = {name: mask.bool() for name, mask in found.get("untrained", {}).items()}
        log = sections(found.get("moves", {}))
        moves = Moves(found.get("moved", {}), {at: log.get(str(at), {}) for at in message.fields.get("moves", [])})
        return cls(info["round"], found.get("model", {}), optimizer, info["totals"], statistics, untrained, moves)


def private_sha256(store: States) -> str:
    """Return a SHA-256 over the hashes of all clients' committed states, whether they are here or on the devices."""
    digest = hashlib.sha256()
    for section in ("client", "server"):
        for client in store.clients(section):
            digest.update(f"{section}:{client}:{state_sha256(store.read(section, client) or b'')}\n".encode())
    return digest.hexdigest()
