"""Who gets which examples: functions from labels and a generator to indices a client."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]
Parts = list[NDArray[np.int64]]


def iid(labels: Labels, clients: int, rng: np.random.Generator) -> Parts:
    """Deal shuffled examples out evenly."""
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


def dirichlet(
    labels: Labels, clients: int, alpha: float, rng: np.random.Generator, *, least: int = 2, tries: int = 100
) -> Parts:
    """Split every class over the clients by proportions from Dirichlet(alpha); drawn anew until all have `least`."""
    for _ in range(tries):
        owner = np.empty(len(labels), dtype=np.int64)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(clients, alpha))
            edges = np.rint(np.cumsum(shares) * len(members)).astype(np.int64)
            owner[members] = np.repeat(np.arange(clients), np.diff(edges, prepend=0))
        sizes = np.bincount(owner, minlength=clients)
        if sizes.min() >= least:
            return [np.flatnonzero(owner == client) for client in range(clients)]
    raise ValueError(
        f"Dirichlet({alpha:g}) gave some of {clients} clients fewer than {least} of {len(labels)} examples "
        f"in {tries} tries; take a larger alpha, fewer clients or a smaller least size"
    )
