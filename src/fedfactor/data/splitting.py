"""The functions that split examples over clients: from labels and a random generator to positions per client.

`partitions` gives them their names and options in recipes.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]
Parts = list[NDArray[np.int64]]


def iid(labels: Labels, clients: int, rng: np.random.Generator) -> Parts:
    """Shuffle the examples and split them evenly."""
    _enough(labels, clients)
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


def dirichlet(
    labels: Labels, clients: int, alpha: float, rng: np.random.Generator, *, min_examples: int = 2, tries: int = 100
) -> Parts:
    """Split each class over the clients by proportions from Dirichlet(alpha).

    Proportions are drawn again until all clients have at least `min_examples`. With many clients and a small alpha that
    may never happen: after `tries` draws, clients with too few get random examples from the client that has most.
    """
    _enough(labels, clients, max(min_examples, 1))
    _positive(alpha)
    classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    owner = np.empty(len(labels), dtype=np.int64)
    for _ in range(max(tries, 1)):
        for found in classes:
            members = rng.permutation(found)
            shares = rng.dirichlet(np.full(clients, alpha))
            edges = np.rint(np.cumsum(shares) * len(members)).astype(np.int64)
            owner[members] = np.repeat(np.arange(clients), np.diff(edges, prepend=0))
        if np.bincount(owner, minlength=clients).min() >= min_examples:
            break
    else:
        _top_up(owner, clients, min_examples, rng)
    return _by_owner(owner, clients)


def shards(labels: Labels, clients: int, rng: np.random.Generator, *, shards: int = 2) -> Parts:
    """Sort by label, cut into `shards` pieces per client and distribute them at random (McMahan et al. 2017)."""
    _enough(labels, clients, shards)
    pieces = np.array_split(np.argsort(labels, kind="stable"), clients * shards)
    order = rng.permutation(clients * shards).reshape(clients, shards)
    return [np.sort(np.concatenate([pieces[piece] for piece in mine])) for mine in order]


def k_classes(labels: Labels, clients: int, k: int, rng: np.random.Generator, *, equal: bool = True) -> Parts:
    """Give each client exactly `k` classes and each class to equally many clients, in equal shares (FLANC).

    With `equal`, all clients have the same number of examples of each of their classes, and the remainder is unused.
    Without it, each class is used completely, and its clients' shares differ by at most one example. If clients times k
    is not a multiple of the number of classes, some classes have one client more than others.
    """
    values = np.unique(labels)
    if not 1 <= k <= len(values):
        raise ValueError(f"classes_per_client must be between 1 and the {len(values)} classes there are, got {k}")
    holders: list[list[int]] = [[] for _ in values]
    for client in range(clients):
        # The classes with the fewest clients so far, ties at random: counts never differ by more than one.
        order = np.lexsort((rng.random(len(values)), np.array([len(held) for held in holders])))
        for chosen in order[:k]:
            holders[chosen].append(client)
    members = [rng.permutation(np.flatnonzero(labels == value)) for value in values]
    held = [(found, mine) for found, mine in zip(members, holders, strict=True) if mine]
    share = min(len(found) // len(mine) for found, mine in held)
    if not share:
        raise ValueError(f"{clients} clients with {k} classes each: some class has fewer examples than clients")
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(clients)]
    for found, mine in held:
        pieces = np.split(found[: share * len(mine)], len(mine)) if equal else np.array_split(found, len(mine))
        for client, piece in zip(mine, pieces, strict=True):
            parts[client].append(piece)
    return [np.sort(np.concatenate(mine)) for mine in parts]


def equal_dirichlet(labels: Labels, clients: int, alpha: float, rng: np.random.Generator, *, size: int = 0) -> Parts:
    """Give each client the same number of examples, with class proportions from Dirichlet(alpha) (PriSM).

    `size` is that number; 0: as many as there are. An infinite alpha means IID. Once a class is used up, later clients
    draw from the remaining classes.
    """
    size = size or len(labels) // max(clients, 1)
    _enough(labels, clients, max(size, 1))
    if alpha == math.inf:
        return [np.sort(part) for part in np.split(rng.permutation(len(labels))[: clients * size], clients)]
    _positive(alpha)
    members = [rng.permutation(np.flatnonzero(labels == value)) for value in np.unique(labels)]
    used = np.zeros(len(members), np.int64)
    total = np.array([len(found) for found in members])
    parts = []
    for _ in range(clients):
        counts = _draw_counts(rng.dirichlet(np.full(len(members), alpha)), total - used, size, rng)
        picked = [found[at : at + n] for found, at, n in zip(members, used, counts, strict=True)]
        parts.append(np.sort(np.concatenate(picked)))
        used += counts
    return parts


def dirichlet_pair(
    labels: Labels,
    test_labels: Labels,
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    *,
    train: int = 500,
    test: int = 100,
    replace_test: bool = False,
) -> tuple[Parts, Parts]:
    """Draw each client's training and test examples with the same class proportions q ~ Dirichlet(alpha) (FedDecomp).

    A client has int(train q_k + 0.5) training and int(test q_k + 0.5) test examples of class k, until the total is
    reached; rounding and small classes can leave fewer. No client has an example twice, except for test examples with
    `replace_test` (FedDecomp's Tiny-ImageNet). Different clients may have the same example.
    """
    _positive(alpha)
    values = np.unique(labels)
    members = [np.flatnonzero(labels == value) for value in values]
    test_members = [np.flatnonzero(test_labels == value) for value in values]
    parts: tuple[Parts, Parts] = ([], [])
    for _ in range(clients):
        q = rng.dirichlet(np.full(len(values), alpha))
        parts[0].append(_drawn(members, q, train, rng, replace=False))
        parts[1].append(_drawn(test_members, q, test, rng, replace=replace_test))
    if clients < 1 or min(len(part) for part in parts[0]) == 0:
        raise ValueError(f"{train} examples over {len(values)} classes by Dirichlet({alpha:g}) left a client with none")
    return parts


def owners(
    ids: Labels, clients: int, rng: np.random.Generator, *, ids_per_client: int = 1, min_examples: int = 1
) -> list[NDArray[np.int64]]:
    """Choose `ids_per_client` owners for each client, among those with at least `min_examples` examples.

    Owners are chosen at random. With `clients` 0 there are as many clients as the owners suffice for. The id -1 means
    no owner.
    """
    able = np.flatnonzero(np.bincount(ids[ids >= 0]) >= max(min_examples, 1))
    each = max(ids_per_client, 1)
    wanted = (clients or len(able) // each) * each
    if not 0 < wanted <= len(able):
        raise ValueError(
            f"{max(wanted, each):,} owners with at least {min_examples:,} examples are needed, {each:,} per "
            f"client, but there are {len(able):,}"
        )
    chosen = rng.permutation(able)[:wanted] if clients or each > 1 else able
    return list(chosen.reshape(-1, each))


def of_owners(ids: Labels, groups: list[NDArray[np.int64]]) -> Parts:
    """Return the rows of each group of owners."""
    top = max([int(ids.max(initial=-1)), *(int(group.max()) for group in groups)])
    client_of = np.full(top + 2, -1, np.int64)
    for client, group in enumerate(groups):
        client_of[group] = client
    # The id -1 reads the last entry, which is -1.
    return _by_owner(client_of[ids], len(groups))


def matching_test(labels: Labels, parts: Parts, test_labels: Labels, rng: np.random.Generator) -> Parts:
    """Choose test examples for each client with the class proportions of its training data.

    A client gets the same share of the test set as it has of the training set, at least one example and none twice.
    Each class of the test set is handed out in a cycle, so that its examples are used about equally often.
    """
    values = np.unique(np.concatenate([labels, test_labels]))
    place, test_place = np.searchsorted(values, labels), np.searchsorted(values, test_labels)
    sizes = np.array([len(part) for part in parts])
    there = np.bincount(test_place, minlength=len(values))
    have = np.stack([np.bincount(place[part], minlength=len(values)) for part in parts])
    goal = np.clip(np.rint(sizes * len(test_labels) / max(int(sizes.sum()), 1)), 1, None)
    exact = have * (goal / np.maximum(sizes, 1))[:, None]
    counts = np.floor(exact).astype(np.int64)
    # The largest remainders get what rounding down left.
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1)
    counts += rank < (goal.astype(np.int64) * (sizes > 0) - counts.sum(1))[:, None]
    counts = np.minimum(counts, there)
    picked: list[list[NDArray[np.int64]]] = [[] for _ in parts]
    for value, column in enumerate(counts.T):
        members = rng.permutation(np.flatnonzero(test_place == value))
        begins = np.cumsum(column) - column
        for client in np.flatnonzero(column):
            picked[client].append(members[(begins[client] + np.arange(column[client])) % len(members)])
    return [np.sort(np.concatenate(mine)) if mine else np.empty(0, np.int64) for mine in picked]


def hold_out(
    ids: Labels, share: float, rng: np.random.Generator, *, ordered: bool = False, gap: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split the rows of each owner into training and test rows: at random, or the last ones if they are `ordered`.

    `gap` rows between the two parts belong to neither, because they overlap with both (windows of a text). Rows without
    an owner (-1) are left out, and, as in LEAF, owners that would have no training or no test rows.
    """
    if not 0 < share < 1:
        raise ValueError(f"the share to hold out must be between 0 and 1, got {share}")
    rows = np.flatnonzero(ids >= 0)
    within = rows if ordered else rng.permutation(rows)
    within = within[np.argsort(ids[within], kind="stable")]
    sizes = np.bincount(ids[within])
    begins = np.cumsum(sizes) - sizes
    rank = np.arange(len(within)) - begins[ids[within]]
    # At least one training row, and of two rows one for each part, whatever the share.
    kept = np.maximum(1, np.minimum(((1 - share) * sizes).astype(np.int64), sizes - 1))
    able = kept + gap < sizes
    mine = able[ids[within]]
    train, test = rank < kept[ids[within]], rank >= (kept + gap)[ids[within]]
    return np.sort(within[mine & train]), np.sort(within[mine & test])


def _by_owner(owner: Labels, clients: int) -> Parts:
    """Return the rows of each client in ascending order; rows with -1 belong to no client."""
    order = np.argsort(owner, kind="stable")
    edges = np.searchsorted(owner[order], np.arange(clients + 1))
    return [order[begin:end] for begin, end in pairwise(edges.tolist())]


def _top_up(owner: Labels, clients: int, min_examples: int, rng: np.random.Generator) -> None:
    """Move as few examples as possible, each from the client that has most, so that all have `min_examples`."""
    sizes = np.bincount(owner, minlength=clients)
    for client in np.flatnonzero(sizes < min_examples):
        while sizes[client] < min_examples:
            richest = int(sizes.argmax())
            moved = rng.choice(np.flatnonzero(owner == richest))
            owner[moved] = client
            sizes[client] += 1
            sizes[richest] -= 1


def _draw_counts(
    q: NDArray[np.float64], left: NDArray[np.int64], size: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw the number of examples per class: `size` in all, by q, at most `left` each. Repeat as classes run empty."""
    counts = np.zeros(len(q), np.int64)
    while (need := size - int(counts.sum())) > 0:
        room = left - counts
        weights = np.where(room > 0, q, 0.0)
        if weights.sum() <= 1e-9:
            weights = room.astype(np.float64)
        counts += np.minimum(rng.multinomial(need, weights / weights.sum()), room)
    return counts


def _drawn(
    members: Parts, q: NDArray[np.float64], total: int, rng: np.random.Generator, *, replace: bool
) -> NDArray[np.int64]:
    picked, left = [], total
    for found, share in zip(members, q, strict=True):
        count = min(int(total * share + 0.5), left)
        count = min(count, len(found)) if not replace or not len(found) else count
        if count:
            picked.append(rng.choice(found, count, replace=replace))
            left -= count
    return np.sort(np.concatenate(picked)) if picked else np.empty(0, np.int64)


def _enough(labels: Labels, clients: int, each: int = 1) -> None:
    if clients < 1 or each < 1 or len(labels) < clients * each:
        raise ValueError(f"{len(labels):,} examples are too few for {clients:,} clients with at least {each:,} each")


def _positive(alpha: float) -> None:
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be positive and finite, got {alpha}")
