"""FLANC: one neural basis, shared by networks of several widths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from fedfactor.factor import Composition, Dense, orthogonality
from fedfactor.factor.base import WeightShape
from fedfactor.methods.factorised import with_factors
from fedfactor.nn import dense_names, factor_weights, factorize, outer_layers
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Diagnostics, Method, Networks, ObservedRound, Participant, Traits
from fedfactor.protocol.plan import Piece, Plan, Tensors
from fedfactor.registry import described, register
from fedfactor.support.checks import check_choice, check_number
from fedfactor.task import Batch, Build, Task

LOGGED = 32
"""Number of basis vectors per layer whose Gram matrix is logged; all of a wide network would fill the journal."""


@register("methods", "flanc", paper="FLANC (NeurIPS 2022)")
@dataclass(frozen=True)
class FLANC(Method, Diagnostics):
    """The weights of a p-width network are W_p = V U_p: a basis V shared by all widths times coefficients U_p.

    V is averaged over all clients. U_p and all other tensors of the p-width network (stem, norms, shortcuts,
    classifier) are averaged over the clients of that width (Eq. 4, weighted by examples). Clients minimise Eq. 3. The
    server holds no dense weight; a model is composed when it is used.

    R1 is a common divisor of a layer's inputs at all widths (Sec. 2.2): the largest one that is at most `r1` times the
    smallest width times the inputs at full width. R2 is `r2` times the outputs at full width, and at most R1 k^2,
    because more basis vectors cannot be independent. Stem, 1 x 1 convolutions and classifier are dense. So is a layer
    whose basis and coefficients are not smaller than its weight, for example at widths without a common divisor.

    Deviations: the paper's text gives no lambda. The default, 10 times the mean of the squares instead of their sum, is
    what the authors ran; `reduction = "sum"` is Eq. 3 as printed. In the authors' ResNet both convolutions of a block
    have the R1 of the first: set such exceptions with `bases`.

    Use it where devices differ and there are many rounds to learn a common basis: no dense weight is uploaded, and
    messages are smaller than with slices. The classifier of a width is trained only by the clients of that width, so
    each width needs enough clients.
    """

    untunable: ClassVar[str] = "the product of its basis and a width's coefficients is no change that starts at zero"

    r1: float = field(
        default=0.5, metadata=described("largest R1, as a share of smallest width times inputs at full width")
    )
    r2: float = field(default=0.25, metadata=described("R2, as a share of the outputs at full width"))
    bases: Mapping[str, tuple[int, int]] = field(
        default_factory=dict, metadata=described("(R1, R2) of the layers whose names match a pattern")
    )
    dense: tuple[str, ...] = field(default=(), metadata=described("patterns of further layers that stay dense"))
    strength: float = field(default=10.0, metadata=described("lambda, the weight of the orthogonality penalty"))
    reduction: Literal["mean", "sum"] = field(
        default="mean", metadata=described("mean or sum of the penalty's squares per layer")
    )
    masked_loss: bool = field(default=False, metadata=described("mask classes that a client lacks in its loss"))
    widths: tuple[float, ...] = field(default=(), metadata=described("the set P; empty: the run's capacities"))

    def __post_init__(self) -> None:
        if not 0 < self.r1 <= 1 or not self.r2 > 0:
            raise ValueError(f"r1 must lie in (0, 1] and r2 above 0, got {self.r1:g} and {self.r2:g}")
        check_number("strength", self.strength, 0)
        check_choice("reduction", self.reduction, ("mean", "sum"))
        for pattern, ranks in self.bases.items():
            if len(ranks) != 2:
                raise ValueError(f"bases of {pattern!r} must be two numbers, R1 and R2, got {list(ranks)}")
            for name, rank in zip(("R1", "R2"), ranks, strict=True):
                check_number(f"{name} of {pattern!r} in bases", rank, 1, whole=True)

    @property
    def traits(self) -> Traits:
        """Clients of less capacity get a narrower network."""
        return Traits(adapts=True, needs_classes="flanc's masked loss" if self.masked_loss else "")

    def bind(self, task: Task, levels: Sequence[float]) -> Self:
        """Take the run's capacities as the set P, or check that `widths` contains them."""
        missing = [level for level in levels if self.widths and level not in self.widths]
        if missing:
            raise ValueError(f"clients of capacity {missing[0]:g} need that width in `widths`, got {list(self.widths)}")
        return self if self.widths else replace(self, widths=tuple(levels))

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the p-width network with composed inner layers."""
        model = build(capacity)
        given = {pattern: Composition(*basis) for pattern, basis in self.bases.items()}
        bases = {**given, **{name: basis for name, basis in self._bases(build).items() if name not in given}}
        network = factorize(model, Dense(), skip=self._outer(model), per_layer=bases)
        return with_factors(network, Dense(), "flanc finds no inner layer to compose in this model")

    def _outer(self, model: nn.Module) -> list[str]:
        return [*outer_layers(model), *self.dense]

    def _bases(self, build: Build) -> dict[str, Composition | None]:
        """Compute R1 and R2 of each layer from its shapes at all widths."""
        widths = sorted({1.0, *self.widths})
        shapes = [self._shapes(build(width).to("meta")) for width in widths]
        found: dict[str, Composition | None] = {}
        for name, full in shapes[-1].items():
            common, most = math.gcd(*(shape[name].inp for shape in shapes)), self.r1 * widths[0] * full.inp + 1e-9
            r1 = max(d for d in range(1, common + 1) if common % d == 0 and d <= max(1, most))
            basis = Composition(r1, max(1, min(round(self.r2 * full.out), r1 * full.area)))
            found[name] = basis if basis.parameters(full) < full.numel else None
        return found

    def _shapes(self, model: nn.Module) -> dict[str, WeightShape]:
        inner = factorize(model, Dense(), skip=self._outer(model))
        weights, names = factor_weights(inner), dense_names(inner)
        return {names[name].removesuffix(".weight"): weight.shape for name, weight in weights.items()}

    def initial(self, networks: Networks) -> Tensors:
        """Return V^0, taken from the widest network, and U_p^0 for each p."""
        server: Tensors = {}
        for width in sorted(self.widths, reverse=True):
            network = networks(width)
            own, server_names = tensors_of(network), self._server_names(network, width)
            server = {server_names[name]: tensor.clone() for name, tensor in own.items()} | server
        return server

    def _server_names(self, network: nn.Module, width: float) -> dict[str, str]:
        """Return the server's names of a network's tensors: the basis keeps its name, others get the width appended."""
        shared = {f"{layer}.v".removeprefix(".") for layer in factor_weights(network)}
        return {name: name if name in shared else f"{name}@{width:g}" for name in tensors_of(network)}

    def weight_names(self, networks: Networks, server: Tensors) -> set[str]:
        """Return the names of the basis and of the parameters of each width."""
        found = set()
        for width in self.widths:
            server_names = self._server_names(networks(width), width)
            found |= {server_names[name] for name, p in networks(width).named_parameters() if p.requires_grad}
        return found

    def plan(self, view: Tensors, who: Participant, network: nn.Module, rng: torch.Generator | None) -> Plan:
        """Return V and the tensors of the client's width (Alg. 1, line 3)."""
        if who.capacity not in self.widths:
            legal = ", ".join(f"{width:g}" for width in self.widths)
            raise ValueError(f"flanc has no network of width {who.capacity:g}: the run's widths are {legal}")
        return {name: Piece(source) for name, source in self._server_names(network, who.capacity).items()}

    def observe(self, observed: ObservedRound) -> dict[str, Any]:
        """Return the use of each basis vector, mean |U| per column and width (Fig. 5), and Gram matrices (Fig. 6)."""
        if not observed.due:
            return {}
        bases = {layer: observed.after[f"{layer}.v"] for layer in factor_weights(observed.networks(1.0))}
        usage = {
            layer: {
                f"{width:g}": _rounded(observed.after[f"{layer}.u@{width:g}"].abs().reshape(-1, len(v)).mean(0))
                for width in self.widths
            }
            for layer, v in bases.items()
        }
        vectors = {layer: v.flatten(1)[:LOGGED] for layer, v in bases.items()}
        return {"mean_abs_u": usage, "gram": {layer: _rounded(v @ v.T) for layer, v in vectors.items()}}

    def objective(self, network: nn.Module, batch: Batch, ctx: Context) -> Tensor:
        """Return Eq. 3: the loss plus lambda ||V V^T - I||^2 of each layer."""
        outputs = ctx.task.outputs(network, batch)
        loss = ctx.task.loss(outputs, batch, only=ctx.labels if self.masked_loss else None)
        for layer in factor_weights(network).values():
            loss = loss + orthogonality(layer.factors["v"], self.strength, reduction=self.reduction)
        return loss


def _rounded(tensor: Tensor) -> Any:
    """Return a tensor as nested lists, rounded to four decimals."""
    return tensor.double().round(decimals=4).tolist()
