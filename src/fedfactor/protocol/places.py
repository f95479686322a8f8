"""Client states of optimizers and codecs when the size of the client's network changes between rounds.

In a round, optimizers and codecs get tensors of the size of the client's current network. Between rounds, the state is
stored in the server's coordinates, in tensors large enough for everything the client has held so far. Elements that the
client never held are zero. If they are needed, the positions are sent with the download as `fields["places"]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedfactor.protocol.message import BadMessage
from fedfactor.protocol.plan import AxisIndex, Piece, Plan, Tensors

FARTHEST = 1 << 31
"""Elements of the largest tensor that a client allocates."""


@dataclass(frozen=True)
class Places:
    """The positions of a client's tensors in this round; `None` if they never change: states are then stored as is."""

    plan: Plan | None = None

    def take(self, kept: Tensors, like: Tensors) -> Tensors:
        """Return the parts of the kept tensors at this round's positions; `like` has tensors of their shapes."""
        if self.plan is None:
            return kept
        return {
            name: piece.take(_grown(kept[piece.source], _reach(piece, like[name].shape)))
            for name, piece in self.plan.items()
            if piece.source in kept
        }

    def put(self, kept: Tensors, held: Tensors) -> Tensors:
        """Return the kept tensors with this round's tensors written to their positions; the rest is unchanged."""
        if self.plan is None:
            return held
        new = dict(kept)
        for name, tensor in held.items():
            piece = self.plan[name]
            old = new.get(piece.source, tensor.new_zeros([0] * tensor.dim())).to(tensor)
            grown = _grown(old, _reach(piece, tensor.shape))
            piece.add(grown, -piece.take(grown))  # gives exactly zero
            piece.add(grown, tensor)
            new[piece.source] = grown
        return new

    def written(self) -> dict[str, Any] | None:
        """Return the positions as JSON: per name its source, and per axis null, a number or runs of [start, length]."""
        if self.plan is None:
            return None
        return {
            name: [piece.source, [_runs(part) if isinstance(part, Tensor) else part for part in piece.index]]
            for name, piece in self.plan.items()
        }

    @classmethod
    def read(cls, written: Any, tensors: Tensors) -> Places:
        """Read the result of `written`. Raise BadMessage if it does not fit the tensors of the download."""
        if written is None:
            return cls()
        if not isinstance(written, dict) or not written.keys() <= tensors.keys():
            raise BadMessage("places must be a table with names of the download's tensors")
        return cls({name: _piece(name, place, tensors[name]) for name, place in written.items()})


def _piece(name: str, place: Any, tensor: Tensor) -> Piece:
    try:
        source, axes = place
        if not isinstance(source, str) or len(axes) > tensor.dim():
            raise ValueError("it has no source, or more axes than the tensor")
        piece = Piece(source, tuple(_axis(part, size) for part, size in zip(axes, tensor.shape, strict=False)))
        _reach(piece, tensor.shape)
    except (TypeError, ValueError) as error:
        shape = list(tensor.shape)
        raise BadMessage(f"{place!r:.80} is not a valid place of {name!r}, whose shape is {shape}: {error}") from error
    return piece


def _axis(part: Any, size: int) -> AxisIndex:
    """Return the index along one axis. Raise ValueError if it does not list exactly `size` positions."""
    if part is None or (type(part) is int and part == size):
        return part
    runs = [(start, length) for start, length in part if type(start) is type(length) is int and min(start, length) >= 0]
    if len(runs) < len(part) or sum(length for _, length in runs) != size:
        raise ValueError(f"{part!r:.40} does not list {size} positions")
    return torch.cat([torch.arange(start, start + length) for start, length in runs])


def _runs(positions: Tensor) -> list[list[int]]:
    """Return positions as runs of [start, length]."""
    breaks = (positions.diff() != 1).nonzero().flatten() + 1
    return [[int(run[0]), len(run)] for run in torch.tensor_split(positions, breaks.tolist()) if len(run)]


def _reach(piece: Piece, shape: Sequence[int]) -> list[int]:
    """Return the shape of the smallest tensor that contains a piece."""
    index = (*piece.index, *[None] * (len(shape) - len(piece.index)))
    reach = [
        int(part.max()) + 1 if isinstance(part, Tensor) else size if part is None else part
        for part, size in zip(index, shape, strict=True)
    ]
    if torch.Size(reach).numel() > FARTHEST:
        raise ValueError(f"it needs a tensor of shape {reach}, which is too large")
    return reach


def _grown(tensor: Tensor, size: Sequence[int]) -> Tensor:
    """Return a copy of at least this size along each axis, padded with zeros."""
    grown = tensor.new_zeros([max(pair) for pair in zip(tensor.shape, size, strict=True)])
    grown[tuple(slice(n) for n in tensor.shape)] = tensor
    return grown
