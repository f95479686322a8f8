"""FedHM: clients download the server's dense model, truncated to their rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from fedfactor.factor import SpatialSplit
from fedfactor.methods.composing import ComposedMean
from fedfactor.methods.factorised import with_factors
from fedfactor.methods.spectral import Spectral, split_names, split_weights
from fedfactor.nn import factor_weights, factorize, first_layers, site_names
from fedfactor.nn.norms import without_statistics
from fedfactor.nn.state import answers_with, tensors_of
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Diagnostics, Fold, Networks, Participant, Traits
from fedfactor.protocol.plan import Plan, Tensors, slice_plan
from fedfactor.registry import described, register
from fedfactor.support.checks import check_number
from fedfactor.task import Batch, Build, Task


@register("methods", "fedhm", paper="arXiv:2111.14655")
@dataclass(frozen=True)
class FedHM(Spectral, Diagnostics):
    """The server is dense; a client of capacity gamma < 1 gets each later layer as its truncated SVD of rank gamma O.

    The server composes the uploaded factors and averages them with weights softmax(gamma / tau) (Eq. 1 without its 1/P,
    because softmax sums to one).

    Deviations: the server averages the composed changes and adds them to its weights. The components that truncation
    removed stay on the server, and a round without a training step changes nothing. `literal` averages the composed
    weights, as Eq. 1 is printed, which erases these components; there the server's model takes part as one more client
    if a round has no client of the largest capacity, as in the authors' code. The paper uses self-distillation on
    non-IID data (Sec. 4.1) but defines neither teacher, weight nor temperature. Here the teacher is the downloaded
    model, and the loss is (1 - distill) times the task's loss plus `distill` times the divergence from the teacher. You
    have to choose the weight: the authors' value is unknown. Static batch norm and the masked loss are HeteroFL's, as
    the paper says.

    Use it where devices differ in memory and compute and the server should hold one dense model: each client gets the
    best approximation at its rank. The server computes one SVD per layer and round.
    """

    rho: int = field(default=1, metadata=described("number of first layers that stay full"))
    dense: tuple[str, ...] = field(default=(), metadata=described("patterns of further layers that stay full"))
    tau: float = field(default=math.inf, metadata=described("softmax temperature; infinity: equal weights"))
    masked_loss: bool = field(default=False, metadata=described("mask classes that a client lacks in its loss"))
    static_norm: bool = field(
        default=False, metadata=described("batch norms track no statistics; they are estimated after training")
    )
    distill: float = field(default=0.0, metadata=described("weight of self-distillation, in [0, 1]; 0: none"))
    temperature: float = field(default=1.0, metadata=described("temperature of self-distillation, above 0"))
    rank: int = field(default=0, metadata=described("one rank for all layers below capacity 1 (Sec. 4.4); 0: gamma O"))
    literal: bool = field(default=False, metadata=described("average composed weights instead of their changes"))
    strongest: float = field(default=0.0, metadata=described("largest capacity, for `literal`; 0: the run's largest"))

    def __post_init__(self) -> None:
        for name in ("tau", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name):g}")
        for name, most in {"rho": math.inf, "rank": math.inf, "distill": 1, "strongest": 1}.items():
            check_number(name, getattr(self, name), 0, most, whole=most > 1)

    @property
    def traits(self) -> Traits:
        """The basis changes each round, and weights depend on the capacity unless tau is infinite."""
        rule = "uniform" if self.tau == math.inf and not self.literal else "softmax of capacity / tau"
        mask = "fedhm's masked loss" if self.masked_loss else ""
        soft = "fedhm's self-distillation" if self.distill else ""
        return Traits("turning", rule, True, calibrates=self.static_norm, needs_classes=mask, needs_logits=soft)

    def bind(self, task: Task, levels: Sequence[float]) -> Self:
        """Take the run's largest capacity."""
        return self if self.strongest else replace(self, strongest=max(levels))

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the dense model, or below capacity 1 a low-rank one.

        The first layers, 1 x 1 convolutions and the classifier stay dense at each capacity.
        """
        model = without_statistics(build(1.0)) if self.static_norm else build(1.0)
        if capacity == 1.0:
            return model
        points = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1)]
        classifier = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1:]
        full = [*first_layers(model, self.rho), *points, *classifier, *self.dense]
        split = SpatialSplit(rank=self.rank) if self.rank else SpatialSplit(ratio=capacity)
        # A layer whose factors are no smaller than its weight stays dense.
        tried = factorize(copy.deepcopy(model).to("meta"), split, skip=full)
        large = {name for name, w in factor_weights(tried).items() if split.parameters(w.shape) >= w.shape.numel}
        sites = {name for layer, name in site_names(tried).items() if layer in large}
        made = factorize(model, split, skip=[*full, *sorted(sites)])
        none = f"fedhm finds no layer that is smaller as factors at capacity {capacity:g}; try a lower capacity"
        return with_factors(made, split, none, skip=full)

    def prepare(self, server: Tensors, networks: Mapping[float, nn.Module], *, training: bool) -> Tensors:
        """Factorise each layer once, at the highest rank of the round's clients."""
        ranks: dict[tuple[str, str], int] = {}
        for network in networks.values():
            weights = split_weights(network)
            for place in split_names(network).items():
                ranks[place] = max(ranks.get(place, 0), len(weights[place[0]].factors["v"]))
        view = dict(server)
        for (layer, name), rank in ranks.items():
            # A change that is still zero determines no factors: all rounds draw the same ones.
            factors = SpatialSplit(rank=rank).from_dense(server[name], torch.Generator().manual_seed(0))
            view.update({f"{layer}.{factor}": tensor for factor, tensor in factors.items()})
        return view

    def plan(self, view: Tensors, who: Participant, network: nn.Module, rng: torch.Generator | None) -> Plan:
        """Return the leading components of each factorised layer, and all other tensors whole."""
        return slice_plan(view, tensors_of(network))

    def objective(self, network: nn.Module, batch: Batch, ctx: Context) -> Tensor:
        """Return the loss with mask, self-distillation and Frobenius decay."""
        outputs = ctx.task.outputs(network, batch)
        loss = ctx.task.loss(outputs, batch, only=ctx.labels if self.masked_loss else None)
        if self.distill:
            teacher = ctx.task.outputs(partial(answers_with, network, ctx.down), batch)
            apart = ctx.task.divergence(outputs, teacher, self.temperature)
            loss = (1 - self.distill) * loss + self.distill * apart
        return self.decayed(loss, network, ctx)

    def passes(self, capacity: float) -> dict[float, float]:
        """Count the teacher's forward pass too."""
        return {capacity: 2.0 if self.distill else 1.0}

    def fold(self, server: Tensors, view: Tensors, networks: Networks) -> Fold:
        """Average dense tensors directly, and factorised layers by their composed changes (dense clients included)."""
        return ComposedMean(server, networks, self.tau, self.strongest if self.literal else None)
