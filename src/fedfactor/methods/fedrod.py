"""FedRoD: a shared balanced head and a personal head on one shared body."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedfactor.methods.fedavg import FedAvg
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Traits
from fedfactor.protocol.plan import Tensors
from fedfactor.registry import described, register
from fedfactor.task import Batch, Build, logits_of


class TwoHeads(nn.Module):
    """A generic head g and a personal head h on the same features z.

    In evaluation mode it returns g(z) + h(z). In training mode it returns two sets of logits side by side, g(z) and
    sg(g(z)) + h(sg(z)), where sg is stop-gradient: the personal loss then changes only h.
    """

    def __init__(self, generic: nn.Linear) -> None:
        super().__init__()
        self.generic, self.personal = generic, copy.deepcopy(generic)

    def forward(self, z: Tensor) -> Tensor:
        """Map features (batch, inputs) to logits (batch, classes), in training mode (batch, 2 * classes)."""
        g: Tensor = self.generic(z)
        if self.training:
            return torch.cat([g, g.detach() + self.personal(z.detach())], dim=-1)
        h: Tensor = self.personal(z)
        return g + h

    def plain(self, personal: bool) -> nn.Linear:
        """Return one ordinary layer: the sum of both heads if `personal`, else the generic head."""
        layer = copy.deepcopy(self.generic)
        if personal:
            for own, other in zip(layer.parameters(), self.personal.parameters(), strict=True):
                own.data += other.data
        return layer


@register("methods", "fedrod", paper="arXiv:2107.00778")
@dataclass(frozen=True)
class FedRoD(FedAvg):
    """Body and generic head are shared and averaged, weighted by examples; a personal head stays on the client.

    The generic loss is balanced softmax, -log(N_y^gamma e^{g_y} / sum_c N_c^gamma e^{g_c}), where N_c is the number of
    the client's examples of class c: the cross-entropy of g + gamma log N. It trains the body and the generic head. The
    personal loss is the cross-entropy of g + h and trains h only. A client predicts with g + h, the server's model
    with g.

    Follows re-implementations, which agree on both losses; the authors published no code. As in most of them, h starts
    as a copy of the generic head. The paper's hyper-network variant is not implemented.

    Use it where you need both a model for all clients and one per client, and labels are unevenly distributed: the
    balanced loss serves the common model, the personal head the client's.
    """

    head: str = field(default="fc", metadata=described("name of the classifier, which must be a linear layer"))
    gamma: float = field(default=1.0, metadata=described("exponent of the class counts"))

    def __post_init__(self) -> None:
        if not self.gamma >= 0:
            raise ValueError(f"gamma must be at least 0, got {self.gamma:g}")

    @property
    def traits(self) -> Traits:
        """Body and generic head are a complete model without the personal head."""
        return Traits(complete=True, needs_classes="fedrod's balanced loss")

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model with a second head."""
        model = build(1.0)
        generic = dict(model.named_modules()).get(self.head)
        if not isinstance(generic, nn.Linear):
            found = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
            raise ValueError(f"the model has no linear layer {self.head!r}; its linear layers are {', '.join(found)}")
        model.set_submodule(self.head, TwoHeads(generic))
        return model

    def private_names(self, network: nn.Module) -> set[str]:
        """Return the names of the personal head's tensors."""
        return {name for name in tensors_of(network) if name.startswith(f"{self.head}.personal.")}

    def objective(self, network: nn.Module, batch: Batch, ctx: Context) -> Tensor:
        """Return the sum of the generic and the personal loss; each parameter has a gradient of one of them only."""
        g, both = logits_of(ctx.task.outputs(network, batch)).chunk(2, dim=-1)
        log_counts = torch.full((g.shape[-1],), -torch.inf, dtype=g.dtype, device=g.device)
        log_counts[ctx.labels.to(g.device)] = ctx.counts.to(g.device, g.dtype).log()
        return ctx.task.loss(balanced(g, log_counts, self.gamma), batch) + ctx.task.loss(both, batch)

    def deploy(self, server: Tensors, network: nn.Module, capacity: float, kept: Tensors) -> nn.Module:
        """Return a model with one head: the sum of both for a client, the generic head for the server."""
        own = tensors_of(network)
        unused = {name: own[name] for name in self.private_names(network)}
        model = super().deploy(server, network, capacity, kept or unused)
        heads = model.get_submodule(self.head)
        assert isinstance(heads, TwoHeads)
        model.set_submodule(self.head, heads.plain(personal=bool(kept)))
        return model


def balanced(logits: Tensor, log_counts: Tensor, gamma: float) -> Tensor:
    """Return g + gamma log N; a class that the client does not have gets probability and gradient zero."""
    return logits + gamma * log_counts if gamma else logits
