"""FedAMP: attentive message passing between personal models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedfactor.nn.state import fill, tensors_of
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Fold, Method, Networks, Participant, Traits, parameter_names
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.plan import HoldersMean, Plan, Reply, Tensors, pull
from fedfactor.protocol.settings import Training
from fedfactor.registry import described, register
from fedfactor.task import Batch


@register("methods", "fedamp", paper="arXiv:2007.03797")
@dataclass(frozen=True)
class FedAMP(Method):
    """The server keeps each client's model w_i and sends client i a mix u_i of the models most similar to w_i.

    xi_ij = alpha A'(||w_i - w_j||^2), A'(d) = exp(-d / sigma) / sigma, xi_ii = 1 - sum_{j != i} xi_ij;
    u_i = sum_j xi_ij w_j. The client starts from its own w_i and minimises F_i(w) + (lambda / 2 alpha) ||w - u_i||^2.
    It uses the trained w_i. Only weights are compared and mixed; batch statistics stay on the client.

    With a large alpha, xi_ii is negative and u_i leaves the convex hull of the models. The gradient at w_i does not
    depend on alpha, so this does no harm as long as u_i is not used as a model or as a starting point.

    Follows re-implementations and third-party quotations of the paper's equations. The defaults are those of Fling, the
    framework of FedDecomp's authors. The paper's heuristic variant is not implemented.

    Deviations: with partial participation, clients that never took part are left out of the mix, and the first u_i of
    a client is the initial model. The server has no model of its own: its tensors stay the initial model.

    Use it where clients form groups with similar data and no common model is needed: the server learns which clients
    are similar. It keeps one model per client and compares all pairs, so it suits tens or hundreds of clients, not
    millions.
    """

    strength: float = field(default=1.0, metadata=described("lambda"))
    alpha: float = field(default=1e4, metadata=described("alpha_k in the first rounds"))
    alpha_decay: float = field(default=0.1, metadata=described("factor applied to alpha every `alpha_every` rounds"))
    alpha_every: int = field(default=30, metadata=described("rounds between two decays of alpha"))
    sigma: float = field(default=100.0, metadata=described("scale of the squared distance"))

    def __post_init__(self) -> None:
        for name in ("alpha", "sigma", "alpha_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name):g}")

    @property
    def traits(self) -> Traits:
        """Each client has its own model, and the mix is weighted by attention."""
        return Traits(space="personal", weighting="attention")

    def alpha_of(self, round: int) -> float:
        """Return alpha_k for a round, counted from 0."""
        return self.alpha * self.alpha_decay ** (round // self.alpha_every)

    def download(
        self, view: Tensors, who: Participant, plan: Plan, held: Mapping[int, Tensors], network: nn.Module
    ) -> Tensors:
        """Return u_i, the mix of the clients' models for this client."""
        if who.client not in held:
            return pull(view, plan)
        own = held[who.client]
        weights = parameter_names(network)
        mixed = {name: tensor.clone() for name, tensor in own.items()}
        for other in held:
            if other == who.client:
                continue
            theirs = held[other]
            distance = sum(float((own[name] - theirs[name]).double().square().sum()) for name in weights)
            attention = self.alpha_of(who.round) * math.exp(-distance / self.sigma) / self.sigma
            for name in weights:
                mixed[name].add_(theirs[name] - own[name], alpha=attention)
        return mixed

    def load(self, network: nn.Module, down: Tensors, kept: Tensors, *, training: bool) -> None:
        """Start from the client's own model."""
        fill(network, kept or down)

    def objective(self, network: nn.Module, batch: Batch, ctx: Context) -> Tensor:
        """Add (lambda / 2 alpha_k) ||w - u_i||^2 to the loss."""
        loss = super().objective(network, batch, ctx)
        weights = {name: network.get_parameter(name) for name in parameter_names(network)}
        distance = torch.stack([(p - ctx.down[name]).square().sum() for name, p in weights.items()]).sum()
        return loss + self.strength / (2 * self.alpha_of(ctx.round)) * distance

    def keep(self, network: nn.Module) -> Tensors:
        """Keep the whole model on the client."""
        return tensors_of(network)

    def fold(self, server: Tensors, view: Tensors, networks: Networks) -> Fold:
        """Leave the server's tensors unchanged: each client has its own model."""
        return HoldersMean(server, self.weight, lambda reply: replace(reply, tensors={}))

    def refuses(self, optimizer: Optimizer, codec: Codec, training: Training | None = None) -> str | None:
        """Refuse optimizers and codecs that need clients to start from the download."""
        if optimizer.anchors:
            return (
                f"{optimizer.name} keeps clients near the model they received, but {self.name} trains a different one"
            )
        if codec.codes_changes:
            return f"{codec.name} codes the change since the download, but {self.name} trains a different model"
        return super().refuses(optimizer, codec, training)

    def remember(self, reply: Reply) -> Tensors:
        """Keep the latest model of each client on the server."""
        return reply.tensors
