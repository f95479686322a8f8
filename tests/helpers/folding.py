"""Folding replies, and committing states, as a round does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from fedfactor.protocol.method import Fold, Method
from fedfactor.protocol.plan import Held, HoldersMean, Reply, Tensors
from fedfactor.server.store import Store


def added(fold: Fold, replies: Sequence[Reply]) -> tuple[Tensors, Held]:
    """Add the replies and return the result."""
    for reply in replies:
        fold.add(reply)
    return fold.result()


def folded(
    method: Method,
    server: Tensors,
    replies: Sequence[Reply],
    networks: Callable[[float], nn.Module] = lambda capacity: nn.Identity(),
    view: Tensors | None = None,
) -> tuple[Tensors, Held]:
    """Return what a method makes of replies."""
    return added(method.fold(server, server if view is None else view, networks), replies)


def holders_mean(view: Tensors, replies: Sequence[Reply], weights: Sequence[float]) -> tuple[Tensors, Held]:
    """Return the mean over the holders of each element, with these weights."""
    left = iter(weights)
    return added(HoldersMean(view, lambda reply: next(left)), replies)


def commit(
    store: Store, version: int, states: Mapping[str, Mapping[int, bytes]], server: bytes, info: dict[str, Any]
) -> None:
    """Stage states and commit them."""
    for section, mine in states.items():
        for client, state in mine.items():
            store.stage(version, section, client, state)
    store.commit(version, [server], info)
