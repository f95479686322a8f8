from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedfactor.data import splitting as P
from fedfactor.data.splitting import Labels, Parts
from fedfactor.rng import numpy_rng

seeds = st.integers(0, 10_000)


@st.composite
def labelled(draw: st.DrawFn, least: int = 30, most: int = 300) -> Labels:
    classes = draw(st.integers(2, 8))
    size = draw(st.integers(least, most))
    labels = np.random.default_rng(draw(seeds)).integers(0, classes, size)
    labels[:classes] = np.arange(classes)
    return labels


def rng(seed: int = 0) -> np.random.Generator:
    return numpy_rng(seed, "partition")


def assert_disjoint(parts: Parts, size: int, *, complete: bool) -> None:
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    assert together.min() >= 0 and together.max() < size
    if complete:
        assert len(together) == size


def counts(labels: Labels, parts: Parts) -> np.ndarray[Any, Any]:
    return np.stack([np.bincount(labels[part], minlength=int(labels.max()) + 1) for part in parts])


@given(labelled(), st.integers(1, 20), seeds)
def test_iid(labels: Labels, clients: int, seed: int) -> None:
    parts = P.iid(labels, clients, rng(seed))
    assert_disjoint(parts, len(labels), complete=True)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(labelled(), st.integers(1, 12), st.sampled_from([0.01, 0.1, 1.0, 100.0]), st.integers(1, 2), seeds)
def test_dirichlet(labels: Labels, clients: int, alpha: float, min_examples: int, seed: int) -> None:
    parts = P.dirichlet(labels, clients, alpha, rng(seed), min_examples=min_examples, tries=3)
    assert len(parts) == clients
    assert_disjoint(parts, len(labels), complete=True)
    assert min(map(len, parts)) >= min_examples
    again = P.dirichlet(labels, clients, alpha, rng(seed), min_examples=min_examples, tries=3)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_dirichlet_with_many_clients_is_fast_and_whole() -> None:
    labels = np.repeat(np.arange(10), 5000)
    before = time.process_time()
    parts = P.dirichlet(labels, 1000, 0.1, rng())
    assert time.process_time() - before < 5
    assert_disjoint(parts, 50_000, complete=True)
    assert min(map(len, parts)) >= 2
    # Topping up the smallest does not blur the classes: clients have few of them.
    assert (counts(labels, parts) > 0).sum(1).mean() < 5


def test_dirichlet_follows_alpha() -> None:
    labels = np.repeat(np.arange(10), 500)
    spread = [
        float(np.std(counts(labels, P.dirichlet(labels, 20, alpha, rng())))) for alpha in (0.1, 1.0, 10.0, 1000.0)
    ]
    assert spread == sorted(spread, reverse=True)
    # The variance of a share is p (1 - p) / (1 + clients alpha) with p = 1 / clients.
    expected = 500 * math.sqrt((1 / 20) * (19 / 20) / (1 + 20))
    assert abs(spread[1] - expected) < 0.2 * expected


@given(labelled(), st.integers(1, 10), st.integers(1, 3), seeds)
def test_shards(labels: Labels, clients: int, each: int, seed: int) -> None:
    parts = P.shards(labels, clients, rng(seed), shards=each)
    assert_disjoint(parts, len(labels), complete=True)
    assert max(map(len, parts)) - min(map(len, parts)) <= each


def test_two_shards_are_mcmahans() -> None:
    labels = rng(1).permutation(np.repeat(np.arange(10), 600))
    parts = P.shards(labels, 100, rng())
    assert {len(part) for part in parts} == {60}
    # 200 shards of 30, 20 a class: none crosses a class, so everyone has one or two.
    table = counts(labels, parts)
    assert set((table > 0).sum(1)) == {1, 2}
    assert set(np.unique(table)) == {0, 30, 60}


@given(st.integers(2, 8), st.integers(1, 25), st.integers(1, 8), st.booleans(), seeds)
def test_k_classes(classes: int, clients: int, k: int, equal: bool, seed: int) -> None:
    assume(k <= classes)
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), 40))
    parts = P.k_classes(labels, clients, k, rng(seed), equal=equal)
    assert_disjoint(parts, len(labels), complete=not equal and clients * k >= classes)
    table = counts(labels, parts)
    assert set((table > 0).sum(1)) == {k}
    holders = (table > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    if equal:
        assert len(np.unique(table[table > 0])) == 1
    else:
        for column in table.T:
            assert not column.any() or column[column > 0].max() - column[column > 0].min() <= 1


def test_k_classes_are_flancs() -> None:
    labels = np.repeat(np.arange(10), 5000)
    table = counts(labels, P.k_classes(labels, 100, 3, rng()))
    assert set((table > 0).sum(0)) == {30}
    assert set(table[table > 0]) == {166}
    iid = counts(labels, P.k_classes(labels, 100, 10, rng()))
    assert set(iid.flatten()) == {50}


@given(labelled(), st.integers(1, 15), st.sampled_from([0.001, 0.1, 1.0, math.inf]), seeds)
def test_equal_dirichlet(labels: Labels, clients: int, alpha: float, seed: int) -> None:
    parts = P.equal_dirichlet(labels, clients, alpha, rng(seed))
    assert {len(part) for part in parts} == {len(labels) // clients}
    assert_disjoint(parts, len(labels), complete=len(labels) % clients == 0)


def test_equal_dirichlet_makes_prisms_imdb() -> None:
    labels = np.repeat([0, 1], 18_750)
    parts = P.equal_dirichlet(labels, 100, math.inf, rng())
    assert {len(part) for part in parts} == {375}
    assert_disjoint(parts, 37_500, complete=True)
    few = P.equal_dirichlet(labels, 100, 0.1, rng(), size=30)
    assert {len(part) for part in few} == {30}
    assert (counts(labels, few).max(1) >= 27).mean() > 0.5


def test_dirichlet_pair_is_feddecomps() -> None:
    labels, test_labels = np.repeat(np.arange(10), 5000), np.repeat(np.arange(10), 1000)
    train, test = P.dirichlet_pair(labels, test_labels, 40, 0.1, rng())
    redrawn = rng()
    for mine, own in zip(train, test, strict=True):
        assert len(np.unique(mine)) == len(mine) <= 500
        assert len(np.unique(own)) == len(own) <= 100
        q = redrawn.dirichlet(np.full(10, 0.1))
        for drawn, total, of in ((mine, 500, labels), (own, 100, test_labels)):
            expected, left = [], total
            for share in q:
                expected.append(min(int(total * share + 0.5), left))
                left -= expected[-1]
            assert np.bincount(of[drawn], minlength=10).tolist() == expected
            for value, count in enumerate(expected):
                if count:
                    redrawn.choice(np.flatnonzero(of == value), count, replace=False)
    assert len(np.unique(np.concatenate(train))) < sum(map(len, train))


def test_dirichlet_pair_with_few_test_examples() -> None:
    labels, test_labels = np.repeat(np.arange(5), 600), np.repeat(np.arange(5), 50)
    _, capped = P.dirichlet_pair(labels, test_labels, 10, 0.05, rng())
    assert all(max(Counter(test_labels[part]).values()) <= 50 for part in capped)
    _, repeated = P.dirichlet_pair(labels, test_labels, 10, 0.05, rng(), replace_test=True)
    assert min(map(len, repeated)) > 95
    with pytest.raises(ValueError, match="left a client with none"):
        P.dirichlet_pair(np.arange(100), np.arange(100), 3, 1e6, rng(), train=10)


def natural(ids: Any, clients: int, rng: np.random.Generator, **options: int) -> Any:
    return P.of_owners(ids, P.owners(ids, clients, rng, **options))


@given(st.integers(1, 30), st.integers(1, 3), st.integers(0, 4), st.integers(1, 6), seeds)
def test_natural(owners: int, each: int, clients: int, min_examples: int, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(-1, owners, 120)
    sizes = np.bincount(ids[ids >= 0], minlength=owners)
    able = int((sizes >= min_examples).sum())
    wanted = clients or able // each
    assume(0 < wanted * each <= able)
    parts = natural(ids, clients, rng(seed), ids_per_client=each, min_examples=min_examples)
    assert len(parts) == wanted
    assert_disjoint(parts, len(ids), complete=False)
    for part in parts:
        mine = np.unique(ids[part])
        assert len(mine) == each and mine.min() >= 0
        assert sizes[mine].min() >= min_examples
        assert len(part) == sizes[mine].sum()


def test_natural_says_what_is_lacking() -> None:
    with pytest.raises(ValueError, match="6 owners with at least 2 examples are needed, 2 per client, but there are 3"):
        natural(np.array([0, 0, 1, 1, 2, 2, 3]), 3, rng(), ids_per_client=2, min_examples=2)
    with pytest.raises(ValueError, match="1 owners with at least 9 examples are needed"):
        natural(np.array([0, 0]), 0, rng(), min_examples=9)


@given(labelled(), labelled(least=20, most=100), st.integers(1, 10), st.sampled_from([0.1, 1.0]), seeds)
def test_own_test_examples_match(labels: Labels, tests: Labels, clients: int, alpha: float, seed: int) -> None:
    parts = P.dirichlet(labels, clients, alpha, rng(seed))
    own = P.matching_test(labels, parts, tests, rng(seed))
    assert len(own) == clients
    there = np.bincount(tests, minlength=8)
    for mine, test in zip(parts, own, strict=True):
        assert len(np.unique(test)) == len(test)
        have, got = np.bincount(labels[mine], minlength=8), np.bincount(tests[test], minlength=8)
        assert not got[have == 0].any()
        goal = max(round(len(mine) * len(tests) / len(labels)), 1)
        assert (np.abs(got - np.minimum(have * goal / len(mine), there)) < 1.001).all()


def test_own_test_examples_are_all_used_once_if_they_divide() -> None:
    labels, tests = np.repeat(np.arange(10), 500), np.repeat(np.arange(10), 100)
    own = P.matching_test(labels, P.shards(labels, 50, rng()), tests, rng())
    assert_disjoint(own, 1000, complete=True)


@given(st.integers(1, 12), st.sampled_from([0.1, 0.2, 0.5, 0.9]), st.booleans(), st.integers(0, 3), seeds)
def test_hold_out(owners: int, share: float, ordered: bool, gap: int, seed: int) -> None:
    ids = np.sort(np.random.default_rng(seed).integers(-1, owners, 100))
    train, test = P.hold_out(ids, share, rng(seed), ordered=ordered, gap=gap)
    assert not len(np.intersect1d(train, test))
    assert set(ids[train]) == set(ids[test])
    for owner in range(owners):
        size = int((ids == owner).sum())
        mine, held = train[ids[train] == owner], test[ids[test] == owner]
        kept = max(1, min(int((1 - share) * size), size - 1))
        if kept + gap >= size:
            assert not len(mine) and not len(held)
            continue
        assert (len(mine), len(held)) == (kept, size - kept - gap)
        if ordered:
            assert mine.max() + gap < held.min()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda y: P.iid(y, 11, rng()), "10 examples are too few for 11 clients"),
        (lambda y: P.iid(y, 0, rng()), "too few for 0 clients"),
        (lambda y: P.dirichlet(y, 6, 1.0, rng()), "10 examples are too few for 6 clients with at least 2 each"),
        (lambda y: P.dirichlet(y, 2, 0.0, rng()), "alpha must be positive and finite, got 0.0"),
        (lambda y: P.dirichlet(y, 2, math.inf, rng()), "alpha must be positive and finite"),
        (lambda y: P.shards(y, 6, rng()), "too few for 6 clients"),
        (
            lambda y: P.k_classes(y, 2, 3, rng()),
            "classes_per_client must be between 1 and the 2 classes there are, got 3",
        ),
        (lambda y: P.k_classes(y, 20, 2, rng()), "some class has fewer examples than clients"),
        (lambda y: P.equal_dirichlet(y, 3, 1.0, rng(), size=4), "too few for 3 clients with at least 4"),
        (lambda y: P.hold_out(y, 1.0, rng()), "must be between 0 and 1"),
    ],
)
def test_mistakes(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(np.repeat([0, 1], 5))
