"""Folds of methods whose server is dense and whose clients train low-rank factors of its layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from fedfactor.factor import SpatialSplit
from fedfactor.factor.base import WeightShape
from fedfactor.factor.products import ComposedProducts, StackedProducts
from fedfactor.methods.spectral import split_names
from fedfactor.protocol.method import Networks
from fedfactor.protocol.plan import Held, HoldersMean, Piece, Plan, Reply, Tensors, WeightedSum, whole_plan


class ComposedMean(HoldersMean):
    """The mean of dense tensors and of composed factors, with weights proportional to exp(gamma / tau) (FedHM, Eq. 1).

    Composed changes are averaged, or with `strongest` composed weights (Eq. 1 as printed). There, the server's model
    takes part as one more client unless a client of at least this capacity replied.
    """

    def __init__(self, server: Tensors, networks: Networks, tau: float, strongest: float | None) -> None:
        super().__init__(server, lambda reply: 1.0)
        self._tau, self._strongest = tau, strongest
        self._layers = cache(lambda capacity: split_names(networks(capacity)))
        self._products: dict[str, ComposedProducts] = {}
        self._largest = 0.0

    def add(self, reply: Reply) -> None:
        """Add a reply. Weights are relative to the largest capacity so far, so that a small tau cannot overflow."""
        if reply.capacity > self._largest:
            self.scale(math.exp((self._largest - reply.capacity) / self._tau))
            self._largest = reply.capacity
        share, layers = math.exp((reply.capacity - self._largest) / self._tau), self._layers(reply.capacity)
        factors = factors_of(layers)
        dense = [name for name in reply.tensors if name not in factors]
        reference = reply.reference if self._strongest is None else self.view
        self.add_tensors(replace(reply, plan=whole_plan(dense), reference=reference), dense, share)
        for layer, name in layers.items():
            total = self.sum_of(name)
            total.count(Piece(name), share)
            products = self._products.setdefault(name, ComposedProducts(total.change))
            u, v = (reply.tensors[f"{layer}.{factor}"] for factor in "uv")
            if self._strongest is None:
                products.add_change([u, v], [reply.reference[f"{layer}.{factor}"] for factor in "uv"], share)
            else:
                products.add(u * share, v)
                total.change.sub_(self.view[name], alpha=share)

    def changes(self, reply: Reply) -> Iterator[tuple[Piece, Tensor]]:
        """Yield the composed changes of layers, and the changes of dense tensors."""
        layers = self._layers(reply.capacity)
        for layer, name in layers.items():
            shape = WeightShape.of(self.view[name])
            new, old = (
                SpatialSplit().compose({one: tensors[f"{layer}.{one}"] for one in "uv"}, shape)
                for tensors in (reply.tensors, reply.reference)
            )
            yield Piece(name), new - old
        for name in sorted(reply.tensors.keys() - factors_of(layers)):
            yield Piece(name), reply.change(name)

    def places(self, plan: Plan, capacity: float) -> Iterator[Piece]:
        """Yield the dense tensors, whole."""
        layers = self._layers(capacity)
        yield from map(Piece, [*layers.values(), *sorted(plan.keys() - factors_of(layers))])

    def scale(self, factor: float) -> None:
        """Multiply the weights of all replies so far."""
        for products in self._products.values():
            products.compose()
        super().scale(factor)

    def result(self) -> tuple[Tensors, Held]:
        """Return the mean, and the number of clients that held each element."""
        if self._strongest is not None and self._largest < self._strongest:
            self.add(Reply(-1, 1.0, 1, whole_plan(self.view), self.view, self.view, {}))
        for products in self._products.values():
            products.compose()
        return super().result()


class DecomposedMean(HoldersMean):
    """The mean of products U V, decomposed at the end, and of all other tensors (FlexLoRA)."""

    def __init__(self, view: Tensors, weight: Callable[[Reply], float], factors: Sequence[tuple[str, str]]) -> None:
        """Take the names of U and V of each product."""
        super().__init__(view, weight)
        self._products = {names: StackedProducts() for names in factors}
        self._factors = {name for names in factors for name in names}
        self._changed: set[tuple[str, str]] = set()
        self._total = 0.0
        self._count: Tensor | float = 0
        self._dense = {f"{u} {v}": (u, v) for u, v in factors}
        """The factors of each product, by the name of the sum of its composed changes (see `changes`)."""

    def add(self, reply: Reply) -> None:
        """Add a reply."""
        share = self.share(reply)
        self._total, self._count = self._total + share, self._count + 1
        self.add_tensors(reply, [name for name in reply.tensors if name not in self._factors], share)
        for names, products in self._products.items():
            new, old = ([tensors[name] for name in names] for tensors in (reply.tensors, reply.reference))
            products.add_change(new, old, share)
            if any(reply.change(name).any() for name in names):
                self._changed.add(names)

    def changes(self, reply: Reply) -> Iterator[tuple[Piece, Tensor]]:
        """Yield the composed changes of products, and the changes of all other tensors."""
        for name, factors in self._dense.items():
            new, old = (product(*(some[one] for one in factors)) for some in (reply.tensors, reply.reference))
            yield Piece(name), new - old
        for name in sorted(reply.tensors.keys() - self._factors):
            yield reply.plan[name], reply.change(name)

    def places(self, plan: Plan, capacity: float) -> Iterator[Piece]:
        """Yield the products, whole, and the places of all other tensors."""
        yield from (Piece(name) for name in self._dense)
        yield from (piece for name, piece in plan.items() if name not in self._factors)

    def sum_of(self, source: str) -> WeightedSum:
        """Return the sum of the changes of a tensor of the view, or of a product."""
        if source in self._dense and source not in self._sums:
            self._sums[source] = WeightedSum(product(*(self.view[factor] for factor in self._dense[source])))
        return super().sum_of(source)

    def result(self) -> tuple[Tensors, Held]:
        """Add the mean change of each product to the view's product, and decompose the sum where it has changed."""
        composed = {self._dense[name]: self._sums.pop(name) for name in self._dense if name in self._sums}
        mean, held = super().result()
        for names, total in composed.items():
            change, self._count = total.mean(torch.zeros_like(total.change))
            u, v = (self.view[name] for name in names)
            inputs = torch.eye(v[0].numel(), dtype=v.dtype).view(-1, *v.shape[1:])
            self._products[names].add(change.view(len(u), -1, *u.shape[2:]), inputs)
            self._changed.add(names)
        for names, products in self._products.items():
            held |= dict.fromkeys(names, self._count)
            if names in self._changed:
                u, v = (self.view[name] for name in names)
                products.scale(1 / (self._total or 1.0))
                products.add(u, v)
                mean |= dict(zip(names, products.decomposed(len(v)), strict=True))
        return mean, held


def factors_of(layers: Iterable[str]) -> set[str]:
    """Return the names of the factors of some layers."""
    return {f"{layer}.{factor}" for layer in layers for factor in "uv"}


def product(u: Tensor, v: Tensor) -> Tensor:
    """Return the weight that U (out, r) and V (r, inp, *kernel) compose."""
    return (u.flatten(1) @ v.flatten(1)).view(len(u), *v.shape[1:])
