"""Pufferfish: full rank at first, then low rank in the later layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import nn

from fedfactor.checks import check_number
from fedfactor.factor import ChannelSplit
from fedfactor.factor.base import Scheme
from fedfactor.methods.factorised import Factorised
from fedfactor.methods.fedavg import FedAvg
from fedfactor.nn import first_layers, outer_layers
from fedfactor.nn.state import fill, tensors_of
from fedfactor.protocol.method import Method
from fedfactor.protocol.plan import Tensors
from fedfactor.registry import described, register
from fedfactor.task import Build


@register("methods", "pufferfish", paper="arXiv:2103.03936")
@dataclass(frozen=True)
class Pufferfish(Factorised):
    """FedAvg on the full model for `warmup` rounds; then its later layers are split by SVD and the factors averaged.

    A layer (O, I, k, k) becomes a k x k convolution to r = floor(ratio min(O, I k^2)) channels, V^T sqrt(Sigma), and a
    1 x 1 convolution, U sqrt(Sigma). The first layers, 1 x 1 convolutions and the classifier stay full. Norms and full
    layers are carried over, and optimizers start anew: moments and control variates on the server, and whatever clients
    kept for an optimizer or a codec. What is measured after the last warm-up round is the split model already.

    Definition not re-read in the paper; it follows the authors' code, where 80 of 300 epochs are warm-up. That factors
    are averaged as they are, and when a federated run should change over, is nowhere written: FedPara's Table 10 names
    no warm-up, and 0, factors from the start, is the default.

    Use it where first rounds may be dense and later ones must be small, or where low rank from the start learns
    badly.
    """

    warmup: int = field(default=0, metadata=described("rounds of full rank"))
    ratio: float = field(
        default=0.25,
        metadata=described(
            "rank as a share of the smaller side of a layer's matrix", tries=(0.5, 0.25, 0.125, 0.0625, 0.03125)
        ),
    )
    first: int = field(default=1, metadata=described("first layers that stay full"))

    def __post_init__(self) -> None:
        for name in ("warmup", "first"):
            check_number(name, getattr(self, name), 0, whole=True)
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must lie in (0, 1], got {self.ratio:g}")

    def at(self, round: int) -> Method:
        """Be FedAvg while warming up."""
        return FedAvg() if round < self.warmup else self

    def scheme(self) -> Scheme:
        """Return the split of a layer."""
        return ChannelSplit(ratio=self.ratio, rounding="floor")

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Factorise the later layers of the task's model."""
        return self._hybrid(build(1.0))

    def _hybrid(self, model: nn.Module, *, keep_weights: bool = False) -> nn.Module:
        full = [*first_layers(model, self.first), *outer_layers(model), *self.dense]
        return self.factorised(model, full, keep_weights=keep_weights)

    def convert(self, server: Tensors, before: nn.Module) -> Tensors:
        """Split the server's weights by SVD."""
        full = copy.deepcopy(before).to("cpu", torch.float32)  # in full precision, however clients train
        fill(full, server)
        return {name: tensor.clone() for name, tensor in tensors_of(self._hybrid(full, keep_weights=True)).items()}
