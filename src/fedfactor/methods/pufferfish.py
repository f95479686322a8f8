"""Pufferfish: full rank for the first rounds, then low rank in the later layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import nn

from fedfactor.factor import ChannelSplit
from fedfactor.factor.base import Scheme
from fedfactor.methods.factorised import Factorised, factorised
from fedfactor.methods.fedavg import FedAvg
from fedfactor.nn import first_layers, outer_layers
from fedfactor.nn.state import fill, tensors_of
from fedfactor.protocol.method import Method, Staged
from fedfactor.protocol.plan import Tensors
from fedfactor.registry import described, register
from fedfactor.support.checks import check_number
from fedfactor.task import Build


@register("methods", "pufferfish", paper="arXiv:2103.03936")
@dataclass(frozen=True)
class Pufferfish(Factorised, Staged):
    """FedAvg on the full model for `warmup` rounds; then the later layers are split by SVD and their factors averaged.

    A layer (O, I, k, k) becomes a k x k convolution to r = floor(ratio min(O, I k^2)) channels, V^T sqrt(Sigma), and a
    1 x 1 convolution, U sqrt(Sigma). The first layers, 1 x 1 convolutions and the classifier stay full. Norms and full
    layers keep their values at the change. Optimizers restart: moments and control variates on the server are reset,
    and so are the clients' states of optimizers and codecs. After the last warm-up round, the split model is measured.

    Follows the authors' code, where 80 of 300 epochs are warm-up. The code is not federated: averaging the factors
    themselves and the length of the warm-up in rounds are choices made here. FedPara's Table 10 mentions no warm-up, so
    the default is 0, factors from the first round.

    Use it where the first rounds may be dense and later ones must be small, or where training with low rank from the
    start is not accurate enough.
    """

    warmup: int = field(default=0, metadata=described("number of rounds at full rank"))
    ratio: float = field(
        default=0.25,
        metadata=described(
            "rank as a share of the smaller side of a layer's matrix", tries=(0.5, 0.25, 0.125, 0.0625, 0.03125)
        ),
    )
    first: int = field(default=1, metadata=described("number of first layers that stay full"))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("warmup", "first"):
            check_number(name, getattr(self, name), 0, whole=True)
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must lie in (0, 1], got {self.ratio:g}")

    def at(self, round: int) -> Method:
        """Return FedAvg for the warm-up rounds."""
        return FedAvg() if round < self.warmup else self

    def scheme(self) -> Scheme:
        """Return the scheme that splits a layer."""
        return ChannelSplit(ratio=self.ratio, rounding="floor")

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model with its later layers factorised."""
        return self._hybrid(build(1.0), keep_weights=self.start == "given")

    def _hybrid(self, model: nn.Module, *, keep_weights: bool) -> nn.Module:
        full = [*first_layers(model, self.first), *outer_layers(model), *self.dense]
        return factorised(self, model, self.scheme(), full, keep_weights=keep_weights)

    def convert(self, server: Tensors, before: nn.Module) -> Tensors:
        """Split the server's weights by SVD."""
        full = copy.deepcopy(before).to("cpu", torch.float32)  # in full precision, whatever dtype clients train in
        fill(full, server)
        return {name: tensor.clone() for name, tensor in tensors_of(self._hybrid(full, keep_weights=True)).items()}
