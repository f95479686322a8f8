"""FedRoD: a shared balanced head and a personal head on one shared body."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedfactor.methods.fedavg import FedAvg
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Traits
from fedfactor.protocol.plan import Tensors
from fedfactor.registry import described, register
from fedfactor.task import Build, Task


class TwoHeads(nn.Module):
    """A generic head g and a personal head h on the same features z.

    In evaluation it returns g(z) + h(z). In training it returns both heads' logits side by side, g(z) and
    sg(g(z)) + h(sg(z)), sg being stop-gradient: the personal loss then moves h alone.
    """

    def __init__(self, generic: nn.Linear) -> None:
        super().__init__()
        self.generic, self.personal = generic, copy.deepcopy(generic)

    def forward(self, z: Tensor) -> Tensor:
        """Map features (batch, inputs) to logits: (batch, classes), in training (batch, 2 classes)."""
        g: Tensor = self.generic(z)
        if self.training:
            return torch.cat([g, g.detach() + self.personal(z.detach())], dim=-1)
        h: Tensor = self.personal(z)
        return g + h

    def plain(self, personal: bool) -> nn.Linear:
        """Return one ordinary layer: both heads added up, or the generic one."""
        layer = copy.deepcopy(self.generic)
        if personal:
            for own, other in zip(layer.parameters(), self.personal.parameters(), strict=True):
                own.data += other.data
        return layer


@register("methods", "fedrod", paper="arXiv:2107.00778")
@dataclass(frozen=True)
class FedRoD(FedAvg):
    """Body and generic head are shared and averaged by data; the personal head stays on the client.

    The generic loss is balanced softmax, -log(N_y^gamma e^{g_y} / sum_c N_c^gamma e^{g_c}) with N_c the number of the
    client's examples of class c: the cross-entropy of g + gamma log N. It trains body and generic head. The personal
    loss is the cross-entropy of g + h and trains h alone. A client predicts with g + h, the server's model with g.

    Definition not re-read in the paper, whose code is not public; re-implementations agree on both losses. Whether the
    paper starts h as a copy of the generic head, as here, is not verified; its hyper-network variant is not here.

    Use it where both are asked for, a model for everybody and one for each client, and labels are unevenly spread:
    the balanced loss is for the first, the second head for the other.
    """

    head: str = field(default="fc", metadata=described("name of the classifier, a linear layer"))
    gamma: float = field(default=1.0, metadata=described("exponent of the class counts"))

    def __post_init__(self) -> None:
        if not self.gamma >= 0:
            raise ValueError(f"gamma must be at least 0, got {self.gamma:g}")

    @property
    def traits(self) -> Traits:
        """Body and generic head are a model without the personal head."""
        return Traits(complete=True)

    def bind(self, task: Task, levels: Sequence[float]) -> Self:
        """Balanced softmax needs classes."""
        if task.kind != "classification":
            raise ValueError(f"fedrod balances classes; a {task.kind} task has none to balance")
        return self

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Put a second head beside the model's own."""
        model = build(1.0)
        generic = dict(model.named_modules()).get(self.head)
        if not isinstance(generic, nn.Linear):
            found = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
            raise ValueError(f"the model has no linear layer {self.head!r}; its linear layers are {', '.join(found)}")
        model.set_submodule(self.head, TwoHeads(generic))
        return model

    def private_names(self, network: nn.Module) -> set[str]:
        """The personal head."""
        return {name for name in tensors_of(network) if name.startswith(f"{self.head}.personal.")}

    def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Add the generic and the personal loss; no parameter has gradients of both."""
        x, y = batch
        g, both = network(x).chunk(2, dim=-1)
        log_counts = torch.full((g.shape[-1],), -torch.inf, dtype=g.dtype, device=g.device)
        log_counts[ctx.labels.to(g.device)] = ctx.counts.to(g.device, g.dtype).log()
        return F.cross_entropy(balanced(g, log_counts, self.gamma), y) + F.cross_entropy(both, y)

    def deploy(self, server: Tensors, network: nn.Module, capacity: float, kept: Tensors) -> nn.Module:
        """Add the two heads up to one layer; without a client's, the generic one is the model's."""
        own = tensors_of(network)
        unused = {name: own[name] for name in self.private_names(network)}
        model = super().deploy(server, network, capacity, kept or unused)
        heads = model.get_submodule(self.head)
        assert isinstance(heads, TwoHeads)
        model.set_submodule(self.head, heads.plain(personal=bool(kept)))
        return model


def balanced(logits: Tensor, log_counts: Tensor, gamma: float) -> Tensor:
    """Return g + gamma log N; a class the client does not have gets no probability and no gradient."""
    return logits + gamma * log_counts if gamma else logits
