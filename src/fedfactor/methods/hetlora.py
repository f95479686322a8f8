"""HetLoRA: clients with different ranks, zero-padded and weighted by the size of their changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedfactor.factor import frobenius_decay
from fedfactor.methods.lora import RankedLora
from fedfactor.protocol.method import Fold, Networks, Traits
from fedfactor.protocol.plan import HoldersMean, Reply, Tensors, whole_plan
from fedfactor.registry import register

SMALLEST = 1e-12
"""Weight of a client that changed nothing: below all others, and not 0."""


@register("methods", "hetlora", paper="arXiv:2401.06432")
@dataclass(frozen=True)
class HetLora(RankedLora):
    """A client of capacity p trains the first p r components; missing ones count as unchanged in the mean.

    The weight of a client is the Frobenius norm of its change B A, over all layers: clients whose training moved more
    count more (sparsity-weighted aggregation).

    Deviations: the paper pads the factors with zeros, which shrinks components that few clients have, even without
    training. Here their changes are padded. Ranks are given by the capacities; the paper's clients also prune theirs.

    Use it as a baseline for `raflora` and `flexlora`.
    """

    @property
    def traits(self) -> Traits:
        """Clients of less capacity get a lower rank, and weights depend on the change."""
        return Traits(adapts=True, weighting="norm of the change B A")

    def weight(self, reply: Reply) -> float:
        """Return ||B A|| of a client; if it is 0 for all, they count the same."""
        return max(math.sqrt(sum(self._squares(reply))), SMALLEST)

    @staticmethod
    def _squares(reply: Reply) -> list[float]:
        layers = [name.removesuffix(".u") for name in reply.tensors if name.endswith(".u")]
        pairs = [(reply.tensors[f"{layer}.u"].double(), reply.tensors[f"{layer}.v"].double()) for layer in layers]
        return [2 * float(frobenius_decay(u, v)) for u, v in pairs]

    def fold(self, server: Tensors, view: Tensors, networks: Networks) -> Fold:
        """Average changes that are padded with zeros."""
        return HoldersMean(view, self.weight, lambda reply: self._padded(view, reply))

    @staticmethod
    def _padded(view: Tensors, reply: Reply) -> Reply:
        whole: Tensors = {}
        for name in reply.tensors:
            piece = reply.plan[name]
            whole[piece.source] = view[piece.source].clone()
            piece.add(whole[piece.source], reply.change(name).to(view[piece.source].dtype))
        return replace(reply, plan=whole_plan(whole), reference={name: view[name] for name in whole}, tensors=whole)
