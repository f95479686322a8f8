"""The map between the server's tensors and one client's, used in both directions.

A plan gives the position of each of a client's tensors on the server: the server's tensor, and the index along each
axis. `pull` reads a download with it; `HoldersMean` averages uploads with it, each element over the clients that held
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    norm: float = 0.0
    """The sum of the 2-norms of `tensors`."""

    def change(self, name: str) -> Tensor:
        """Return what training changed of one tensor, in the client's space."""
        return self.tensors[name] - self.reference[name]

    def scaled(self, factor: float) -> Reply:
        """Return the reply with its changes multiplied by a factor; integers, such as counters, stay as they are."""
        if factor == 1.0:
            return self
        changed = {
            name: self.reference[name] + factor * self.change(name) if tensor.is_floating_point() else tensor
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=changed)


def norm_of(changes: Iterable[Tensor]) -> float:
    """Return the 2-norm of several tensors as one vector."""
    return math.sqrt(sum(float(change.double().square().sum()) for change in changes))


def clip_factor(norm: float, clip: float) -> float:
    """Return the number by which a vector of this norm is multiplied so that its norm is at most `clip`."""
    return min(1.0, clip / norm) if norm else 1.0


Held = dict[str, Tensor | float]
"""The number of clients that held each element of a server tensor; a number if it is the same for all elements."""


def pull(view: Tensors, plan: Plan) -> Tensors:
    """Return a client's tensors, taken from the server's. Do not write to them: they are views where possible."""
    return {name: piece.take(view[piece.source]) for name, piece in plan.items()}


def whole_plan(names: Iterable[str]) -> Plan:
    """Return the plan of a client that holds the named tensors whole."""
    return {name: Piece(name) for name in names}


class HoldersMean:
    """The mean of replies, each element over the clients that held it; replies are added one by one.

    Changes are summed with the weights of their clients, divided by the sum of these weights at the end and added to
    the view. So the view stays exactly as it is where no client held an element or no client has changed it. Sums have
    the dtype of the view's tensors (integers: float64). Weights count relative to the first one: if all are equal, the
    bits do not depend on their value.
    """

    def __init__(
        self,
        view: Tensors,
        weight: Callable[[Reply], float],
        seen_as: Callable[[Reply], Reply] = lambda reply: reply,
    ) -> None:
        """Start with no reply. `seen_as` returns what is averaged of a reply."""
        self.view, self._weight, self.seen_as = view, weight, seen_as
        self._first_weight = 0.0
        self._sums: dict[str, WeightedSum] = {}
        self._scratch = torch.empty(0)

    def add(self, reply: Reply) -> None:
        """Add a reply. Nothing of it is kept."""
        seen = self.seen_as(reply)
        self.add_tensors(seen, seen.tensors, self.share(reply))

    def share(self, reply: Reply) -> float:
        """Return the weight of a reply, relative to the first one that is not 0."""
        weight = self._weight(reply)
        self._first_weight = self._first_weight or weight
        return weight / (self._first_weight or 1.0)

    def add_tensors(self, reply: Reply, names: Iterable[str], share: float) -> None:
        """Add the changes of a reply's named tensors."""
        for name in names:
            total = self.sum_of(reply.plan[name].source)
            total.add(reply.plan[name], self._change(reply, name, total.change), share)

    def sum_of(self, source: str) -> WeightedSum:
        """Return the sum of the changes of a tensor of the view."""
        if source not in self._sums:
            self._sums[source] = WeightedSum(self.view[source])
        return self._sums[source]

    def _change(self, reply: Reply, name: str, like: Tensor) -> Tensor:
        """Return what training changed of a tensor, in memory that the next call uses again."""
        new = reply.tensors[name]
        if not new.dtype == like.dtype == reply.reference[name].dtype:
            return reply.change(name).to(like.dtype)
        if new.numel() > len(self._scratch) or new.dtype != self._scratch.dtype:
            self._scratch = torch.empty(new.numel(), dtype=new.dtype)
        return torch.sub(new, reply.reference[name], out=self._scratch[: new.numel()].view(new.shape))

    def changes(self, reply: Reply) -> Iterator[tuple[Piece, Tensor]]:
        """Yield what a reply changes in the tensors that are summed, before it has a weight."""
        seen = self.seen_as(reply)
        for name in seen.tensors:
            yield seen.plan[name], seen.change(name)

    def places(self, plan: Plan, capacity: float) -> Iterator[Piece]:
        """Yield the positions of the changes of any reply with this plan and capacity."""
        yield from plan.values()

    def sums(self) -> Iterator[WeightedSum]:
        """Yield the sums so far, in the order of their names."""
        for _, total in sorted(self._sums.items()):
            yield total

    def scale(self, factor: float) -> None:
        """Multiply the weights of all replies so far."""
        for total in self._sums.values():
            total.scale(factor)

    def result(self) -> tuple[Tensors, Held]:
        """Return the mean, and the number of clients that held each element. Call it once, after the last reply."""
        mean, held = dict(self.view), Held(dict.fromkeys(self.view, 0))
        for source, total in self._sums.items():
            mean[source], held[source] = total.mean(self.view[source])
        return mean, held


class WeightedSum:
    """The weighted sum of the changes of one server tensor, and the sum of the weights per element."""

    def __init__(self, server: Tensor) -> None:
        self.change = torch.zeros_like(server, dtype=None if server.is_floating_point() else torch.float64)
        # Numbers as long as all clients hold the whole tensor.
        self._weight: Tensor | float = 0.0
        self._count: Tensor | float = 0

    def add(self, piece: Piece, change: Tensor, weight: float) -> None:
        """Add a client's change, which is overwritten if the client holds a part of the tensor."""
        if piece.whole:
            self.change.add_(change, alpha=weight)
        else:
            piece.add(self.change, change.mul_(weight))
        self.count(piece, weight)

    def count(self, piece: Piece, weight: float, clients: float = 1) -> None:
        """Count a client that holds this piece, or several with a weight together."""
        if piece.whole:
            self._weight, self._count = self._weight + weight, self._count + clients
            return
        # Along axes that all clients hold whole, the sums of weights are constant: one entry is enough.
        axes = range(self.change.dim())
        now = self._weight.shape if isinstance(self._weight, Tensor) else [1 for _ in axes]
        cut = [axis < len(piece.index) and piece.index[axis] is not None for axis in axes]
        sizes = [self.change.shape[axis] if cut[axis] else now[axis] for axis in axes]
        self._weight, self._count = (_expanded(of, sizes, self.change) for of in (self._weight, self._count))
        piece.add(self._weight, weight)
        piece.add(self._count, float(clients))

    def scale(self, factor: float) -> None:
        """Multiply all weights so far."""
        self.change.mul_(factor)
        self._weight = self._weight * factor

    @property
    def reached(self) -> Tensor | bool:
        """Which elements some client has been counted for, in a shape that broadcasts to that of the tensor."""
        return self._weight > 0

    def mean(self, server: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the server's tensor plus the mean change, and the number of holders of each element.

        The sum's own memory holds the result. Elements whose holders have no weight keep their value.
        """
        weight = self._weight
        divisor = weight.where(weight > 0, 1.0) if isinstance(weight, Tensor) else weight or 1.0
        mean = self.change.div_(divisor).add_(server)
        count = self._count.expand_as(server) if isinstance(self._count, Tensor) else self._count
        # Integers (batch counters) are rounded.
        return mean if server.is_floating_point() else mean.round_().to(server.dtype), count


def _expanded(sums: Tensor | float, sizes: Sequence[int], like: Tensor) -> Tensor:
    """Return sums of weights with at least one entry per position along the axes whose size is not 1."""
    if not isinstance(sums, Tensor):
        return like.new_full(sizes, sums)
    return sums if list(sums.shape) == list(sizes) else sums.expand(sizes).clone()


class HoldersSum:
    """The sum of clients' tensors in the server's space."""

    def __init__(self, like: Tensors) -> None:
        self._like = like
        self.total: Tensors = {}
        """The sums of the tensors that at least one client has sent."""

    def add(self, plan: Plan, tensors: Tensors) -> None:
        """Add a client's tensors."""
        for name, tensor in tensors.items():
            source = plan[name].source
            if source not in self.total:
                self.total[source] = torch.zeros_like(self._like[source])
            plan[name].add(self.total[source], tensor)


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
