"""Rules that need all replies of a round at once: changes wait on disk, and are read in blocks of elements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fedfactor.protocol.aggregation import Aggregation
from fedfactor.protocol.method import Fold
from fedfactor.protocol.plan import Held, HoldersMean, Piece, Reply, Tensors, clip_factor, norm_of
from fedfactor.server.replies import QuorumLost
from fedfactor.server.spool import Spool

BLOCK_BYTES = 2**26
"""Most bytes of all clients' changes that are in memory at once, unless one element of each client has more."""


class GatheredFold:
    """Puts the changes of a round together by a rule, element by element or client by client."""

    def __init__(self, rule: Aggregation, mean: HoldersMean, directory: Path | None) -> None:
        """Take the rule, and the mean that it replaces."""
        self._rule, self._view, self._seen_as = rule, mean.view, mean.seen_as
        self._changes = Spool(directory)
        self._clients = 0
        self._holders: dict[str, list[int]] = {}

    def add(self, reply: Reply) -> None:
        """Write a reply's changes to disk, in the server's coordinates: NaN where the client holds no element."""
        seen, number = self._seen_as(reply), self._clients
        self._clients += 1
        for name in seen.tensors:
            piece = seen.plan[name]
            holders = self._holders.setdefault(piece.source, [])
            holders.append(number)
            dense = _dense(piece, self._view[piece.source], seen.change(name))
            self._changes.put((piece.source, number), dense.reshape(-1).view(torch.uint8).numpy().data)

    def result(self) -> tuple[Tensors, Held]:
        """Return the server's tensors with the rule's change, and the number of clients that held each element."""
        chosen = self._nearest() if self._rule.rule in ("krum", "multi_krum") else None
        new, held = dict(self._view), Held(dict.fromkeys(self._view, 0))
        for source, holders in self._holders.items():
            server = self._view[source]
            change = torch.zeros(server.numel(), dtype=_dtype(server))
            count = torch.zeros(server.numel())
            for start, block in self._blocks(source, holders):
                part = slice(start, start + block.shape[1])
                if chosen is None:
                    change[part], count[part] = self._middle(block)
                else:
                    change[part] = block[[holders.index(client) for client in chosen]].mean(0)
                    count[part] = len(chosen)
            moved = server.to(change.dtype) + change.view(server.shape)
            new[source] = moved if server.is_floating_point() else moved.round_().to(server.dtype)
            held[source] = count.view(server.shape)
        return new, held

    def _blocks(self, source: str, holders: list[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield the changes of a tensor in blocks, clients by elements, with the position of the first element."""
        dtype, elements = _dtype(self._view[source]), self._view[source].numel()
        size = dtype.itemsize
        width = max(1, BLOCK_BYTES // (size * len(holders)))
        for start in range(0, elements, width):
            end = min(elements, start + width)
            rows = [self._changes.read((source, client), start * size, end * size) for client in holders]
            yield start, torch.stack([torch.frombuffer(row, dtype=dtype) for row in rows])

    def _middle(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Return the median or the trimmed mean of each element over its holders, and their number."""
        ordered, held = block.sort(0).values, block.isfinite().sum(0)  # NaN is sorted to the end
        place = torch.arange(len(block))[:, None]
        if self._rule.rule == "median":
            used = (place == (held - 1).div(2, rounding_mode="floor")) | (place == held.div(2, rounding_mode="floor"))
            used &= place < held
        else:
            cut = (self._rule.hostile * held).floor()
            used = (place >= cut) & (place < held - cut)
        total = ordered.nan_to_num(0.0).mul_(used).sum(0)
        return total / used.sum(0).clamp(min=1), held

    def _nearest(self) -> list[int]:
        """Return the clients that Krum chooses: those whose nearest n - f - 2 other clients are the nearest."""
        n, f = self._clients, self._rule.cut(self._clients)
        if n < 2 * f + 3:
            raise QuorumLost(f"{self._rule.rule} needs more than {2 * f + 2} replies, but {n} clients answered")
        products = torch.zeros(n, n, dtype=torch.float64)
        for source, holders in self._holders.items():
            for _, block in self._blocks(source, holders):
                wide = block.double()
                products += wide @ wide.T
        own = products.diagonal()
        distances = (own[:, None] + own[None, :] - 2 * products).clamp_(min=0).fill_diagonal_(torch.inf)
        scores = distances.sort(1).values[:, : n - f - 2].sum(1)
        return sorted(scores.argsort(stable=True)[: 1 if self._rule.rule == "krum" else n - f].tolist())


def gathered(rule: Aggregation, fold: Fold, directory: Path | None) -> GatheredFold:
    """Return the fold of a rule in place of a method's. Raise ValueError if that is not the mean of each element."""
    if type(fold) is not HoldersMean:
        raise ValueError(f"aggregation.rule: {rule.rule} replaces a mean, but the method has a fold of its own")
    return GatheredFold(rule, fold, directory)


def shortened(reply: Reply, bound: float) -> Reply:
    """Return a reply whose change has at most this 2-norm over all tensors with real numbers."""
    norm = norm_of(reply.change(name) for name, tensor in reply.tensors.items() if tensor.is_floating_point())
    return reply.scaled(clip_factor(norm, bound))


def _dtype(server: Tensor) -> torch.dtype:
    return server.dtype if server.is_floating_point() else torch.float64


def _dense(piece: Piece, server: Tensor, change: Tensor) -> Tensor:
    """Return a client's change as a contiguous tensor of the server's size, with NaN where it holds no element."""
    change = change.to(_dtype(server))
    if piece.whole:
        return change.contiguous()
    dense, holds = torch.zeros(server.shape, dtype=change.dtype), torch.zeros(server.shape, dtype=change.dtype)
    piece.add(dense, change)
    piece.add(holds, 1.0)
    return dense.where(holds > 0, torch.nan)
