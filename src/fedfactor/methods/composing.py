"""Folds of methods whose server is dense and whose clients train low-rank factors of its layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from fedfactor.factor import ChannelSplit
from fedfactor.factor.base import WeightShape
from fedfactor.factor.products import ComposedProducts, StackedProducts
from fedfactor.methods.spectral import split_names
from fedfactor.protocol.method import Networks
from fedfactor.protocol.plan import Held, HoldersMean, Piece, Reply, Tensors, whole_plan


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
        factors = {f"{layer}.{factor}" for layer in layers for factor in "uv"}
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
        self._total, self._count = 0.0, 0

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

    def result(self) -> tuple[Tensors, Held]:
        """Add the mean change of each product to the view's product, and decompose the sum where it has changed."""
        mean, held = super().result()
        for names, products in self._products.items():
            held |= dict.fromkeys(names, self._count)
            if names in self._changed:
                u, v = (self.view[name] for name in names)
                products.scale(1 / (self._total or 1.0))
                products.add(u, v)
                mean |= dict(zip(names, products.decomposed(len(v)), strict=True))
        return mean, held


class KernelMean(HoldersMean):
    """The mean of PriSM's U' and V', element by element, composed at the end."""

    def __init__(
        self, server: Tensors, view: Tensors, weight: Callable[[Reply], float], layers: Mapping[str, str]
    ) -> None:
        super().__init__(view, weight)
        self._server, self._layers = server, layers
        self.picks: dict[str, list[int]] = {}
        """The number of clients that trained each kernel, by layer; known after `result`."""

    def result(self) -> tuple[Tensors, Held]:
        """Add the change of the composed kernels to the server's weights."""
        mean, held = super().result()
        for layer, name in self._layers.items():
            shape = WeightShape.of(self._server[name])
            before, after = (
                ChannelSplit().compose({factor: tensors[f"{layer}.{factor}"] for factor in "uv"}, shape)
                for tensors in (self.view, mean)
            )
            mean[name] = self._server[name] + (after - before)
            u, v = held[f"{layer}.u"], held[f"{layer}.v"]
            held[name] = _reached(u, v)
            kernels = len(self.view[f"{layer}.v"])
            # A client that has a kernel has it for the first input.
            self.picks[layer] = v.flatten(1)[:, 0].int().tolist() if isinstance(v, Tensor) else [v] * kernels
        return {name: mean[name] for name in self._server}, {name: held[name] for name in self._server}


def _reached(u: Tensor | int, v: Tensor | int) -> Tensor | int:
    """Return how many clients could change each entry of U V, through its row of U or its column of V."""
    if isinstance(u, int) or isinstance(v, int):  # all held the whole tensor
        return max(int(part if isinstance(part, int) else part.max()) for part in (u, v))
    rows, columns = u.amax(1), v.amax(0, keepdim=True)
    return torch.maximum(rows.reshape(len(rows), *[1] * (columns.dim() - 1)), columns)
