"""PriSM: each client trains a random set of principal kernels."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedfactor.factor import ChannelSplit, effective_rank, spectrum
from fedfactor.methods.kernels import KernelMean
from fedfactor.methods.spectral import Spectral
from fedfactor.models.width import Width
from fedfactor.nn import compose, dense_names, factor_weights, factorize, outer_layers
from fedfactor.nn.norms import axis_blocks, without_statistics
from fedfactor.nn.state import fill, tensors_of
from fedfactor.protocol.method import Diagnostics, Fold, Networks, ObservedRound, Participant, Traits
from fedfactor.protocol.plan import Piece, Plan, Tensors, slice_plan
from fedfactor.registry import described, register
from fedfactor.support.checks import check_number
from fedfactor.task import Build

SMALL = 0.2
"""Keep ratio up to which clients sample with `kappa_small` (Table 7)."""


@register("methods", "prism", paper="arXiv:2208.13141")
@dataclass(frozen=True)
class PriSM(Spectral, Diagnostics):
    """A client trains r principal kernels of each layer, drawn with probabilities given by sigma^kappa (Eq. 2).

    The server's weights (N, M k^2) are split by SVD into u'_i = sqrt(sigma_i) u_i and v'_i = sqrt(sigma_i) v_i. A
    client gets r = ceil(keep min(N, M k^2)) of these kernels per layer, and slices of them: the first r outputs of
    u'_i, and those inputs of v'_i that the previous layer outputs (Sec. 3.2.1). Stem, shortcuts, norms and classifier
    are sliced to the same channels. Entries are averaged over the clients that hold them, with equal weights (Eq. 5);
    entries that no client held do not change. The SVD of the next round renews the basis. Batch norms track no
    statistics. Eq. 6 is the Frobenius decay.

    With `outputs = "all"` a client has all channels, and only the kernels are sampled: r (M k^2 + N) parameters per
    layer. The authors' code trains this, and the paper's accuracies belong to it; Table 1's sizes belong to slices.

    The channels are those of the task's model at this width, so any model with a `width` can be trained. In PriSM-O2 a
    layer has min(N, 2 r) outputs if the model computes its channels with `models.scaled`. The shapes of Table 1 need a
    stem of full width and sliced shortcuts (for the ResNets here: `scale_stem = false`, `shortcut = "slice"`).

    The server's full model is measured, and a narrower one for each capacity: the first channels of the full model,
    with each layer replaced by its best approximation of rank r. A layer with at most r outputs stays as it is. With
    slices, channels that no client has trained are silent in the full model.

    Deviations: the change of the composed kernels is added to the server's weights, which is Eq. 5 without the rounding
    errors of the SVD. sigma is merged into both factors and is not a parameter, as in the authors' code.

    Use it where no client can train the full model but the server should have it, and there are many rounds: different
    clients train different kernels.
    """

    untunable: ClassVar[str] = "it trains the leading components of the weights themselves"

    kappa: float = field(default=2.5, metadata=described("smoothing exponent of the sampling"))
    kappa_small: float = field(default=4.0, metadata=described("smoothing exponent at a keep ratio of 0.2 or less"))
    outputs: int | Literal["all"] = field(default=1, metadata=described("a layer's outputs: a multiple of r, or 'all'"))
    warm_up: int = field(default=0, metadata=described("first rounds, in which all clients train the leading kernels"))
    dense: tuple[str, ...] = field(default=(), metadata=described("patterns of further layers that stay dense"))
    static_norm: bool = field(default=False, metadata=described("norm statistics of all data, not of each batch"))

    def __post_init__(self) -> None:
        check_number("outputs", 1 if self.outputs == "all" else self.outputs, 1, whole=True)
        for name in ("kappa", "kappa_small", "warm_up"):
            check_number(name, getattr(self, name), 0, whole=name == "warm_up")

    @property
    def traits(self) -> Traits:
        """The basis changes each round, and all clients have equal weight in the mean."""
        return Traits(space="turning", weighting="uniform", adapts=True, calibrates=self.static_norm)

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the sub-model: the task's model at this width, with r kernels per inner layer."""
        full = build(1.0)
        slim = full if capacity == 1 or self.outputs == "all" else build(Width(capacity, self.outputs))
        most = self._ranks(slim, 1.0)  # a width that rounds down may leave fewer channels than r
        ranks = {name: ChannelSplit(rank=min(r, most[name])) for name, r in self._ranks(full, capacity).items()}
        made = factorize(slim, ChannelSplit(), skip=self._outer(slim), per_layer=ranks, keep_weights=capacity == 1)
        return without_statistics(made)

    def _outer(self, model: nn.Module) -> list[str]:
        return [*outer_layers(model), *self.dense]

    def _ranks(self, model: nn.Module, keep: float) -> dict[str, int]:
        """Return r of each inner layer."""
        split = factorize(copy.deepcopy(model).to("meta"), ChannelSplit(ratio=keep), skip=self._outer(model))
        weights, names = factor_weights(split), dense_names(split)
        return {names[name].removesuffix(".weight"): len(weight.factors["v"]) for name, weight in weights.items()}

    def prepare(self, server: Tensors, networks: Mapping[float, nn.Module], *, training: bool) -> Tensors:
        """Decompose each inner layer into all its principal kernels (Alg. 1, line 2).

        For models that are used, not trained, the channels of each narrower network are decomposed too.
        """
        view = dict(server)
        for layer, name in dense_names(next(iter(networks.values()))).items():
            factors = ChannelSplit(ratio=1.0).from_dense(server[name])
            view |= {f"{layer}.u": factors["u"], f"{layer}.v": factors["v"], f"{layer}.sigma": spectrum(factors)}
        for capacity, network in {} if training else networks.items():
            cut = slice_plan(view, tensors_of(network), axis_blocks(network))
            for layer, name in dense_names(network).items():
                rank = len(factor_weights(network)[layer].factors["v"])
                channels = Piece(name, (cut[f"{layer}.u"].index[0], *cut[f"{layer}.v"].index[1:])).take(server[name])
                if rank < len(view[f"{layer}.sigma"]):
                    factors = ChannelSplit(rank=rank).from_dense(channels)
                    view |= {f"{layer}.{factor}@{capacity:g}": tensor for factor, tensor in factors.items()}
        return view

    def plan(self, view: Tensors, who: Participant, network: nn.Module, rng: torch.Generator | None) -> Plan:
        """Draw the client's kernels layer by layer; the other axes are sliced to its channels (Alg. 1, line 6)."""
        plan = slice_plan(view, tensors_of(network), axis_blocks(network))
        for layer, weight in factor_weights(network).items():
            rank, sigma, u, v = len(weight.factors["v"]), view[f"{layer}.sigma"], f"{layer}.u", f"{layer}.v"
            if rank < len(sigma) and rng is None:  # for use, not training: the kernels of its own channels
                plan |= {factor: Piece(f"{factor}@{who.capacity:g}") for factor in (u, v)}
            elif rank < len(sigma) and rng is not None:
                kernels = self.drawn(sigma, rank, who, rng).sort().values
                plan[u] = replace(plan[u], index=(plan[u].index[0], kernels, *plan[u].index[2:]))
                plan[v] = replace(plan[v], index=(kernels, *plan[v].index[1:]))
        return plan

    def drawn(self, sigma: Tensor, count: int, who: Participant, rng: torch.Generator) -> Tensor:
        """Return the indices of kernels drawn without replacement with probabilities sigma^kappa (Eq. 2).

        Sorting independent exponential variables with these rates gives such a draw.
        """
        if who.round < self.warm_up:
            return torch.arange(count)
        kappa = self.kappa_small if who.capacity <= SMALL else self.kappa
        exponentials = torch.empty(len(sigma), dtype=torch.float64).exponential_(generator=rng).log()
        return (exponentials - kappa * sigma.double().log()).argsort(stable=True)[:count]

    def fold(self, server: Tensors, view: Tensors, networks: Networks) -> Fold:
        """Average U' and V' element by element and compose them (Eq. 5)."""
        return KernelMean(server, view, self.weight, dense_names(networks(1.0)))

    def observe(self, observed: ObservedRound) -> dict[str, Any]:
        """Return the effective rank of each layer (Fig. 6) and how many clients trained each kernel (Fig. 7)."""
        fold = observed.fold
        assert isinstance(fold, KernelMean)
        spectra = {layer: observed.view[f"{layer}.sigma"] for layer in fold.picks}
        return {
            "effective_rank": {layer: effective_rank(sigma) for layer, sigma in spectra.items()},
            "effective_rank_code": {layer: effective_rank(sigma, code=True) for layer, sigma in spectra.items()},
            "picks": fold.picks,
        }

    def served(self, levels: Sequence[float]) -> list[float]:
        """Return full capacity and the clients' capacities."""
        return sorted({1.0, *levels}, reverse=True)

    def deploy(self, server: Tensors, network: nn.Module, capacity: float, kept: Tensors) -> nn.Module:
        """Return the dense model, or below full capacity the model of its first channels."""
        if capacity < 1:
            return super().deploy(server, network, capacity, kept)
        plain = compose(network)
        fill(plain, server)
        return plain
