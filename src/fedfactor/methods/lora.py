"""LoRA: low-rank changes of frozen weights, averaged factor by factor (FedIT)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from fedfactor.factor import ChannelSplit
from fedfactor.factor.base import Scheme
from fedfactor.methods.factorised import factorised
from fedfactor.methods.low_rank import LowRankMethod
from fedfactor.nn import factor_weights
from fedfactor.nn.frozen import Frozen
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.method import Participant, Traits
from fedfactor.protocol.plan import Plan, Tensors, slice_plan
from fedfactor.protocol.settings import round_half_up
from fedfactor.registry import described, register
from fedfactor.support.checks import check_number
from fedfactor.task import Build


@register("methods", "lora", paper="arXiv:2305.05644")
@dataclass(frozen=True)
class Lora(LowRankMethod):
    """W = W0 + (alpha / r) B A: the factors A and B of each adapted layer are averaged separately (FedIT).

    B (out, r), here `u`, starts at zero and A (r, in), here `v`, at random. A convolution has A as its kernel and B as
    a 1 x 1 convolution, as in PEFT. The mean of the products is not the product of the means, so the server's change
    differs from the mean of the clients' changes; `ffa_lora`, `rolora`, `flexlora`, `fed_sb`, `fedex_lora` and `flora`
    avoid this.

    Deviations: the paper fine-tunes language models on instructions. Without `[tune]`, there is no frozen W0, and the
    factors are drawn at random or fitted to the weights.

    Use it as the baseline of fine-tuning: a fraction of the bytes of the whole change.
    """

    ratio: float = field(default=0.2, metadata=described("rank as a share of the outputs, if `rank` is 0"))
    rank: int = field(
        default=8, metadata=described("rank of the change; 0: by `ratio`", tries=(64, 32, 16, 8, 4, 2, 1))
    )

    def scheme(self) -> Scheme:
        """Return the scheme U V."""
        return ChannelSplit(ratio=self.ratio, rank=self.rank or None)


def factor_names(network: nn.Module, factor: str) -> set[str]:
    """Return the names of one factor in all layers that have it."""
    return {f"{name}.{factor}".removeprefix(".") for name, w in factor_weights(network).items() if factor in w.factors}


def with_bases(network: nn.Module) -> nn.Module:
    """Give each factorised layer that has no frozen base one of zeros, to which rounds can add; return the network."""
    for weight in factor_weights(network).values():
        if weight.base is None:
            weight.base = Frozen(next(iter(weight.factors.values())).new_zeros(weight.shape.size))
    return network


def factor_scales(network: nn.Module) -> dict[str, float]:
    """Return alpha / r of each layer with factors u and v, by the names of these without the last letter."""
    layers = {f"{name}.".removeprefix("."): weight for name, weight in factor_weights(network).items()}
    return {prefix: weight.scale for prefix, weight in layers.items() if "u" in weight.factors}


@dataclass(frozen=True)
class RankedLora(Lora):
    """LoRA where a client of capacity p trains the first p r components of each layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("rank", self.rank, 1, whole=True)

    @property
    def traits(self) -> Traits:
        """Clients of less capacity get a lower rank."""
        return Traits(adapts=True)

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the model with the rank of this capacity; alpha is divided by the full rank for all clients."""
        scheme = ChannelSplit(rank=max(1, round_half_up(capacity * self.rank)), full_rank=self.rank)
        return factorised(self, build(1.0), scheme, self.dense, keep_weights=self.start == "given")

    def plan(self, view: Tensors, who: Participant, network: nn.Module, rng: torch.Generator | None) -> Plan:
        """Return the leading components of each layer, and all other tensors whole."""
        return slice_plan(view, tensors_of(network))
