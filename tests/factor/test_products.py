"""Sums of low-rank products in batches."""

from __future__ import annotations

import torch

from fedfactor.factor.products import ComposedProducts, StackedProducts


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
