"""What a client keeps between rounds where its network changes its size: kept in the server's coordinates.

Optimizers and codecs see tensors as large as the client's network is in this round. In between, everything lies where
it lies on the server, in tensors that reach as far as the client has ever held; what it never held is zero. The places
come with the download, as `fields["places"]`, where they are needed.
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
"""Elements of the largest tensor that a client makes room for."""


@dataclass(frozen=True)
class Places:
    """The places of a client's tensors in this round; `None`: they never change, and tensors are kept as they are."""

    plan: Plan | None = None

    def take(self, kept: Tensors, like: Tensors) -> Tensors:
        """Return what was kept of the places of this round; the tensors in `like` have their shapes."""
        if self.plan is None:
            return kept
        return {
            name: piece.take(_grown(kept[piece.source], _reach(piece, like[name].shape)))
            for name, piece in self.plan.items()
            if piece.source in kept
        }

    def put(self, kept: Tensors, held: Tensors) -> Tensors:
        """Return what was kept with this round's tensors put into their places; all else stays."""
        if self.plan is None:
            return held
        new = dict(kept)
        for name, tensor in held.items():
            piece = self.plan[name]
            old = new.get(piece.source, tensor.new_zeros([0] * tensor.dim())).to(tensor)
            room = _grown(old, _reach(piece, tensor.shape))
            piece.add(room, -piece.take(room))  # exactly zero
            piece.add(room, tensor)
            new[piece.source] = room
        return new

    def written(self) -> dict[str, Any] | None:
        """Return the places as JSON has them: a name's source, and an axis as null, a number, or [start, length]s."""
        if self.plan is None:
            return None
        return {
            name: [piece.source, [_runs(part) if isinstance(part, Tensor) else part for part in piece.index]]
            for name, piece in self.plan.items()
        }

    @classmethod
    def read(cls, written: Any, tensors: Tensors) -> Places:
        """Read what `written` gave, and check that it fits the tensors that came with it."""
        if written is None:
            return cls()
        if not isinstance(written, dict) or not written.keys() <= tensors.keys():
            raise BadMessage("places must be given by the names of the download's tensors")
        return cls({name: _piece(name, place, tensors[name]) for name, place in written.items()})


def _piece(name: str, place: Any, tensor: Tensor) -> Piece:
    try:
        source, axes = place
        if not isinstance(source, str) or len(axes) > tensor.dim():
            raise ValueError("no source, or more axes than the tensor has")
        piece = Piece(source, tuple(_axis(part, size) for part, size in zip(axes, tensor.shape, strict=False)))
        _reach(piece, tensor.shape)
    except (TypeError, ValueError) as error:
        shape = list(tensor.shape)
        raise BadMessage(f"{place!r:.80} is no place of {name!r}, which is {shape}: {error}") from error
    return piece


def _axis(part: Any, size: int) -> AxisIndex:
    """Check the place along one axis, which the tensor fills exactly."""
    if part is None or (type(part) is int and part == size):
        return part
    runs = [(start, length) for start, length in part if type(start) is type(length) is int and min(start, length) >= 0]
    if len(runs) < len(part) or sum(length for _, length in runs) != size:
        raise ValueError(f"{part!r:.40} does not list {size} positions")
    return torch.cat([torch.arange(start, start + length) for start, length in runs])


def _runs(positions: Tensor) -> list[list[int]]:
    """Write positions as [start, length] of their runs."""
    breaks = (positions.diff() != 1).nonzero().flatten() + 1
    return [[int(run[0]), len(run)] for run in torch.tensor_split(positions, breaks.tolist()) if len(run)]


def _reach(piece: Piece, shape: Sequence[int]) -> list[int]:
    """Return the size of the smallest tensor that has this place."""
    index = (*piece.index, *[None] * (len(shape) - len(piece.index)))
    reach = [
        int(part.max()) + 1 if isinstance(part, Tensor) else size if part is None else part
        for part, size in zip(index, shape, strict=True)
    ]
    if torch.Size(reach).numel() > FARTHEST:
        raise ValueError(f"a place that reaches to {reach} is too far")
    return reach


def _grown(tensor: Tensor, size: Sequence[int]) -> Tensor:
    """Return a copy that is at least of this size along every axis; what is new is zero."""
    room = tensor.new_zeros([max(pair) for pair in zip(tensor.shape, size, strict=True)])
    room[tuple(slice(n) for n in tensor.shape)] = tensor
    return room
