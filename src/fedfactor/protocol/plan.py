"""The map between the server's tensors and one client's, used in both directions.

A plan gives the position of each of a client's tensors on the server: the server's tensor, and the index along each
axis. `pull` reads a download with it; `holders_mean` averages uploads with it, each element over the clients that held
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

AxisIndex = int | Tensor | None
"""Index along one axis: all (`None`), the first n (an int), or the listed positions (a 1-d integer tensor)."""


@dataclass(frozen=True)
class Piece:
    """The position of a client's tensor on the server."""

    source: str
    index: tuple[AxisIndex, ...] = ()
    """One entry per axis; further axes are taken whole."""

    @property
    def whole(self) -> bool:
        """Whether the client holds the server's whole tensor."""
        return all(part is None for part in self.index)

    def take(self, tensor: Tensor) -> Tensor:
        """Return the piece of the server's tensor that the client holds."""
        for axis, part in enumerate(self.index):
            if isinstance(part, int):
                tensor = tensor.narrow(axis, 0, part)
            elif part is not None:
                tensor = tensor.index_select(axis, part.to(tensor.device))
        return tensor

    def add(self, into: Tensor, piece: Tensor | float) -> None:
        """Add a client's piece, or a number, to its positions in a tensor of the server's size, in place."""
        listed = [axis for axis, part in enumerate(self.index) if isinstance(part, Tensor)]
        leading = Piece(self.source, tuple(None if axis in listed else part for axis, part in enumerate(self.index)))
        into = leading.take(into)
        if not listed:
            into.add_(piece)
            return
        places = [self.index[axis] for axis in listed]
        positions = [part.to(into.device) for part in places if isinstance(part, Tensor)]
        if len(listed) == 1:
            size = [len(positions[0]) if axis == listed[0] else n for axis, n in enumerate(into.shape)]
            piece = piece if isinstance(piece, Tensor) else into.new_tensor(piece).expand(size)
            into.index_add_(listed[0], positions[0], piece)
            return
        # An open mesh of positions addresses the cross product of the axes' indices.
        axes = [torch.arange(size, device=into.device) for size in into.shape]
        for axis, part in zip(listed, positions, strict=True):
            axes[axis] = part
        into[tuple(torch.meshgrid(axes, indexing="ij"))] += piece


Plan = dict[str, Piece]


@dataclass(frozen=True)
class Reply:
    """What one accepted client sent back, decoded and validated."""

    client: int
    capacity: float
    samples: int
    plan: Plan
    reference: Tensors
    """The download as the client decoded it: changes are measured against this."""
    tensors: Tensors
    extras: Tensors
    """What the optimizer sent along."""
    figures: dict[str, float] = field(default_factory=dict)
    """What the method's `report` says about the client's training."""
    labels: tuple[int, ...] = ()
    """The classes that the client has, if the method's clients send them."""

    def change(self, name: str) -> Tensor:
        """Return what training changed of one tensor, in the client's space."""
        return self.tensors[name] - self.reference[name]


Held = dict[str, Tensor | int]
"""The number of clients that held each element of a server tensor; an int if it is the same for all elements."""


def pull(view: Tensors, plan: Plan) -> Tensors:
    """Return a client's tensors, taken from the server's. Do not write to them: they are views where possible."""
    return {name: piece.take(view[piece.source]) for name, piece in plan.items()}


def whole_plan(names: Iterable[str]) -> Plan:
    """Return the plan of a client that holds the named tensors whole."""
    return {name: Piece(name) for name in names}


def holders_mean(view: Tensors, replies: Sequence[Reply], weights: Sequence[float]) -> tuple[Tensors, Held]:
    """Average the replies, each element over the clients that held it.

    The changes are averaged and added to the view, so that the view stays exactly as it is where no client held an
    element or no client has changed it.
    """
    holders: dict[str, list[tuple[Reply, str, float]]] = {}
    for reply, weight in zip(replies, weights, strict=True):
        for name in reply.tensors:
            holders.setdefault(reply.plan[name].source, []).append((reply, name, weight))
    mean, held = dict(view), Held(dict.fromkeys(view, 0))
    for source, holding in holders.items():
        mean[source], held[source] = _mean_of(view[source], holding)
    return mean, held


def _mean_of(server: Tensor, holding: list[tuple[Reply, str, float]]) -> tuple[Tensor, Tensor | int]:
    exact = server if server.is_floating_point() else server.double()
    total = sum(weight for _, _, weight in holding)
    if all(reply.plan[name].whole for reply, name, _ in holding):
        change, one = torch.zeros_like(exact), torch.empty_like(exact)
        for reply, name, weight in holding:
            torch.sub(reply.tensors[name], reply.reference[name], out=one)
            change.add_(one, alpha=weight / total)
        return _like(server, exact + change), len(holding)
    # Along axes that all clients hold whole, the sums of weights are constant: one entry is enough.
    pieces = [reply.plan[name] for reply, name, _ in holding]
    sizes = [
        size if any(axis < len(piece.index) and piece.index[axis] is not None for piece in pieces) else 1
        for axis, size in enumerate(exact.shape)
    ]
    change, mass, count = torch.zeros_like(exact), exact.new_zeros(sizes), exact.new_zeros(sizes)
    for piece, (reply, name, weight) in zip(pieces, holding, strict=True):
        piece.add(change, reply.change(name).to(exact) * (weight / total))
        piece.add(mass, weight / total)
        piece.add(count, 1.0)
    mean = exact + change / mass.where(count > 0, torch.ones_like(mass))
    return _like(server, mean), count.expand_as(exact)


def _like(server: Tensor, mean: Tensor) -> Tensor:
    """Convert a mean to the server's dtype; integers (batch counters) are rounded."""
    return mean if server.is_floating_point() else mean.round().to(server.dtype)


def holders_sum(like: Tensors, plans: Sequence[Plan], pieces: Sequence[Tensors]) -> Tensors:
    """Return the sum of clients' tensors in the server's space."""
    total = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    for plan, tensors in zip(plans, pieces, strict=True):
        for name, tensor in tensors.items():
            plan[name].add(total[plan[name].source], tensor)
    return total


def slice_plan(view: Tensors, client: Tensors, blocks: Mapping[str, tuple[int, ...]] | None = None) -> Plan:
    """Return the plan of a client whose tensors are the leading part of the server's along each axis.

    `blocks` gives the number of equal blocks (gates, or heads) along the first axes of some tensors: the leading part
    of each block is taken.
    """
    unknown = [name for name in client if name not in view]
    if unknown:
        raise ValueError(
            f"a narrower network has {unknown[0]!r}, which the full one lacks; build the model so that its width only "
            "changes sizes (for ResNets here: shortcut = 'slice')"
        )
    return {
        name: Piece(name, _leading(name, view[name], tensor, (blocks or {}).get(name, ())))
        for name, tensor in client.items()
    }


def _leading(name: str, server: Tensor, client: Tensor, blocks: tuple[int, ...]) -> tuple[AxisIndex, ...]:
    if server.dim() != client.dim() or any(c > s for c, s in zip(client.shape, server.shape, strict=True)):
        raise ValueError(f"{name}: a client's {list(client.shape)} is not a part of the server's {list(server.shape)}")
    index: list[AxisIndex] = [None if c == s else c for c, s in zip(client.shape, server.shape, strict=True)]
    if 0 in blocks and any(part is not None for part in index):
        raise ValueError(
            f"{name}: a bidirectional layer cannot be cut to a width; give it full width, or use two "
            "unidirectional layers"
        )
    for axis, count in enumerate(blocks):
        if count > 1 and index[axis] is not None:
            if server.shape[axis] % count or client.shape[axis] % count:
                raise ValueError(
                    f"{name}: axis {axis} of {server.shape[axis]} and {client.shape[axis]} does not consist of {count} "
                    "equal blocks (gates, or heads of attention)"
                )
            part, whole = client.shape[axis] // count, server.shape[axis] // count
            index[axis] = torch.cat([torch.arange(part) + block * whole for block in range(count)])
    return tuple(index)
