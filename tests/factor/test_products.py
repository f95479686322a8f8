"""Sums of low-rank products in batches."""

from __future__ import annotations

import pytest
import torch

from fedfactor.factor.products import ComposedProducts, StackedProducts, WeightedProducts, product


def test_batches_add_up_to_the_sum_of_all_products() -> None:
    """More numbers than the weight has, so that several batches are composed; V's memory may be used again."""
    rng = torch.Generator().manual_seed(0)
    into, expected = torch.zeros(6, 5), torch.zeros(6, 5, dtype=torch.float64)
    products, start = ComposedProducts(into), [torch.randn(6, 2, generator=rng), torch.randn(2, 5, generator=rng)]
    for client in range(7):
        new = [part + torch.randn(part.shape, generator=rng) for part in start]
        expected += (client + 1) * (new[0].double() @ new[1].double() - start[0].double() @ start[1].double())
        products.add_change(new, start, client + 1)
        new[1].fill_(float("nan"))
    assert into.abs().sum() > 0, "batches are composed before the end"
    products.compose()
    torch.testing.assert_close(into, expected.float(), rtol=1e-4, atol=1e-4)
    before = into.clone()
    products.compose()
    assert torch.equal(into, before)


def test_stacked_products_are_reduced_without_loss() -> None:
    """Nine products of rank 2 of a 4 x 3 matrix: more columns than it can have rank."""
    rng = torch.Generator().manual_seed(0)
    products, expected = StackedProducts(), torch.zeros(4, 3)
    for _ in range(9):
        u, v = torch.randn(4, 2, generator=rng), torch.randn(2, 3, generator=rng)
        expected += u @ v
        products.add(u, v)
        assert sum(len(v) for _, v in products._batch) <= 6
    products.scale(0.5)
    u, v = products.decomposed(3)
    torch.testing.assert_close(u @ v, expected / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("clients", "rank"), [(1, 0), (3, 4), (9, None)])
def test_weighted_products_stay_in_factors_while_these_are_smaller(clients: int, rank: int | None) -> None:
    """Factors of rank 2 of a kernel of 8 x (3 x 2 x 2) have 40 numbers, the kernel 96: a third pair is composed."""
    rng = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(8, 2, 1, 1, generator=rng), torch.randn(2, 3, 2, 2, generator=rng)) for _ in range(clients)]
    if rank == 4:
        pairs = [(u.repeat(5, 1, 1, 1), v.repeat(1, 5, 1, 1)) for u, v in pairs]  # a larger kernel
    weights, products = range(1, clients + 1), WeightedProducts()
    for weight, (u, v) in zip(weights, pairs, strict=True):
        products.add(weight, u, v)
    means = [sum(w * pair[i] for w, pair in zip(weights, pairs, strict=True)) / sum(weights) for i in (0, 1)]
    mean = sum(w * product(u, v) for w, (u, v) in zip(weights, pairs, strict=True)) / sum(weights)
    residual, found = products.residual(*means), products.mean()
    assert set(found) == ({"w"} if rank is None else {"u", "v"})
    torch.testing.assert_close(found["w"] if rank is None else product(**found), mean)
    if rank == 0:
        assert residual == {}, "one client is its own mean"
        return
    assert set(residual) == set(found) and (rank is None or len(residual["v"]) == rank)
    wanted = mean - product(*means)
    torch.testing.assert_close(residual["w"] if rank is None else product(**residual), wanted, rtol=1e-4, atol=1e-5)
