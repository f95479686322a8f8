"""FedAMP: attentive message passing between personal models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedfactor.nn.state import fill, tensors_of
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Method, Networks, Participant, Traits
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.plan import Held, Plan, Reply, Tensors, pull
from fedfactor.protocol.settings import Training
from fedfactor.registry import described, register


@register("methods", "fedamp", paper="arXiv:2007.03797")
@dataclass(frozen=True)
class FedAMP(Method):
    """The server holds every client's model w_i and sends each client u_i, a mix of the models most like its own.

    xi_ij = alpha A'(||w_i - w_j||^2), A'(d) = exp(-d / sigma) / sigma, xi_ii = 1 - the others; u_i = sum_j xi_ij w_j.
    The client minimises F_i(w) + (lambda / 2 alpha) ||w - u_i||^2 from its own w_i, which is what is deployed.

    Definition not re-read in the paper, whose heuristic variant is not here. With large alpha, xi_ii is negative and
    u_i leaves the convex hull; the gradient at w_i does not depend on alpha, so u_i is never used as a starting point
    here. Only weights are compared and mixed; batch statistics stay as the client has them.

    Deviations: with partial participation, clients that never took part are left out of the mix, and a newcomer's u_i
    is where it starts. The server has no model of its own: its tensors are where all clients start, and stay so.

    Use it where clients fall into groups that are alike and nobody needs a common model: the server learns who is
    like whom. It keeps a model a client and compares them all, so it is for tens or hundreds of clients, not
    millions.
    """

    strength: float = field(default=1.0, metadata=described("lambda"))
    alpha: float = field(default=1e4, metadata=described("alpha_k of the first rounds"))
    alpha_decay: float = field(default=0.1, metadata=described("factor on alpha every `alpha_every` rounds"))
    alpha_every: int = field(default=30, metadata=described("rounds between two decays of alpha"))
    sigma: float = field(default=100.0, metadata=described("scale of the squared distance"))

    def __post_init__(self) -> None:
        for name in ("alpha", "sigma", "alpha_every"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name):g}")

    @property
    def traits(self) -> Traits:
        """What others need to know about this method."""
        return Traits(space="personal", weighting="attention")

    def alpha_of(self, round: int) -> float:
        """Return alpha_k of a round, counted from 0."""
        return self.alpha * self.alpha_decay ** (round // self.alpha_every)

    def download(
        self, view: Tensors, who: Participant, plan: Plan, held: Mapping[int, Tensors], network: nn.Module
    ) -> Tensors:
        """Mix the clients' models for this client: u_i."""
        if who.client not in held:
            return pull(view, plan)
        own = held[who.client]
        weights = [name for name, _ in network.named_parameters()]
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

    def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Add (lambda / 2 alpha_k) ||w - u_i||^2; squared, and with its gradient."""
        loss = super().objective(network, batch, ctx)
        distance = torch.stack([(p - ctx.down[name]).square().sum() for name, p in network.named_parameters()]).sum()
        return loss + self.strength / (2 * self.alpha_of(ctx.round)) * distance

    def keep(self, network: nn.Module) -> Tensors:
        """The client keeps its whole model."""
        return tensors_of(network)

    def aggregate(
        self, server: Tensors, view: Tensors, replies: Sequence[Reply], networks: Networks
    ) -> tuple[Tensors, Held]:
        """Leave the server's tensors alone: every client has a model of its own."""
        return dict(server), Held(dict.fromkeys(server, 0))

    def refuses(self, optimizer: Optimizer, codec: Codec, training: Training | None = None) -> str | None:
        """What comes down is not where a client starts: neither an anchor nor a reference for changes."""
        if optimizer.anchors:
            return f"{optimizer.name} holds clients to the model they received, but {self.name} trains another"
        if codec.codes_changes:
            return f"{codec.name} codes changes of what came down, but {self.name} trains another model"
        return super().refuses(optimizer, codec, training)

    def remember(self, replies: Sequence[Reply]) -> dict[int, Tensors]:
        """The server keeps every client's latest model."""
        return {reply.client: reply.tensors for reply in replies}
