"""FedCAC: critical parameters are averaged with similar clients, all others with all clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedfactor.nn.state import tensors_of
from fedfactor.protocol.method import Fold, Method, Networks, Participant, Traits
from fedfactor.protocol.plan import HoldersMean, Plan, Reply, Tensors, pull
from fedfactor.protocol.states import HeldTensors
from fedfactor.registry import described, register

MASK = "critical:"
"""Prefix of the names of the masks that the server stores with a client's tensors."""
CHUNK = 1 << 22
"""Mask entries, summed over all clients, that one matrix product counts: float32 counts them exactly."""
ALMOST = 1e-9
"""Tolerance when overlaps are compared. They are ratios of counts, so different ones differ by more than this."""


@register("methods", "fedcac", paper="arXiv:2309.11103")
@dataclass(frozen=True)
class FedCAC(Method):
    """The server keeps each client's model theta_i and a mask M_i of its critical parameters.

    Critical are the share tau of a tensor's entries with the largest sensitivity |(theta_i - theta_i^start) theta_i|
    over the round. O_ij = 1 - |M_i - M_j| / (2 |M_i|) is the overlap of the masks of two clients. After round t, client
    i collaborates with the set C_i: itself and all j with O_ij >= T_t = mean O + (t / beta) (max O - mean O). The set
    shrinks over the rounds. Client i downloads M_i cust_i + (1 - M_i) global. cust_i is the unweighted mean over C_i;
    global is the mean over the round's clients, weighted by examples. Only weights are mixed; norm statistics stay on
    the client.

    Follows the authors' code.

    Deviations: in the authors' code, clients upload their masks, one bit per parameter. Here the server computes them
    from the download and the upload, so with a lossy codec they describe the decoded update. With partial
    participation, clients that never took part get the global model, and absent clients are mixed with the model of
    their last upload.

    Use it where clients differ in some respects only: parameters that are critical for a client are shared with
    similar clients only. Each client should take part often, because others use the model of its last upload.
    """

    tau: float = field(default=0.5, metadata=described("share of each tensor's parameters that is critical"))
    beta: int = field(default=100, metadata=described("rounds until only the most similar clients collaborate"))

    def __post_init__(self) -> None:
        if not 0 <= self.tau <= 1:
            raise ValueError(f"tau must lie in [0, 1], got {self.tau:g}")
        if not self.beta > 0:
            raise ValueError(f"beta must be above 0, got {self.beta}")

    @property
    def traits(self) -> Traits:
        """Each client has its own model."""
        return Traits(space="personal")

    def private_names(self, network: nn.Module) -> set[str]:
        """Return the names of the buffers, such as norm statistics."""
        weights = {name for name, _ in network.named_parameters()}
        return {name for name in tensors_of(network) if name not in weights}

    def download(self, view: Tensors, who: Participant, plan: Plan, held: HeldTensors, network: nn.Module) -> Tensors:
        """Return M_i cust_i + (1 - M_i) global."""
        if who.client not in held:
            return pull(view, plan)
        partners = collaborators(held.once(overlaps), list(held), who.client, who.round / self.beta)
        own, mixed = held[who.client], {}
        for name in plan:
            custom = torch.zeros_like(own[name])
            for partner in partners:
                custom += held[partner][name] / len(partners)
            mixed[name] = torch.where(own[MASK + name], custom, view[name])
        return mixed

    def fold(self, server: Tensors, view: Tensors, networks: Networks) -> Fold:
        """Average the models, not the changes: clients started from different models."""
        return HoldersMean(view, self.weight, lambda reply: replace(reply, reference=pull(view, reply.plan)))

    def remember(self, reply: Reply) -> Tensors:
        """Keep the latest model of each client and its mask on the server."""
        masks = {name: critical(reply.reference[name], tensor, self.tau) for name, tensor in reply.tensors.items()}
        return reply.tensors | {MASK + name: mask for name, mask in masks.items()}


def critical(start: Tensor, trained: Tensor, share: float) -> Tensor:
    """Return a mask of the share of entries with the largest |(theta - theta^start) theta|; ties are included."""
    sensitivity = ((trained - start) * trained).abs()
    count = int(share * sensitivity.numel())
    if not count or not sensitivity.any():
        return torch.zeros_like(sensitivity, dtype=torch.bool)
    threshold = sensitivity.flatten().topk(count).values[-1]
    if threshold <= 1e-10:  # fewer entries changed than should be marked: mark these only
        threshold = sensitivity[sensitivity > 0].min()
    return sensitivity >= threshold


def overlaps(held: Mapping[int, Tensors]) -> Tensor:
    """Return the matrix O_ij in the order of the clients; 0 where a client has no critical parameter."""
    common = torch.zeros(len(held), len(held), dtype=torch.float64)
    for name in next(iter(held.values())):
        if name.startswith(MASK):
            masks = torch.stack([held[client][name].flatten() for client in held])
            for part in torch.split(masks, max(1, CHUNK // len(held)), dim=1):
                ones = part.float()
                common += ones @ ones.T
    size = common.diagonal()
    apart = size[:, None] + size[None, :] - 2 * common
    return torch.where(size[:, None] > 0, 1 - apart / (2 * size[:, None]).clamp(min=1), torch.zeros_like(common))


def collaborators(overlap: Tensor, clients: Sequence[int], client: int, progress: float) -> list[int]:
    """Return C_i: client i and all clients whose overlap with it is at least T_t. `progress` is t / beta."""
    others = overlap[~torch.eye(len(clients), dtype=torch.bool)]
    if not len(others):
        return [client]
    mean, largest = float(others.mean()), float(others.max())
    threshold = mean + progress * (largest - mean)
    row = overlap[clients.index(client)]
    return [j for j, value in zip(clients, row.tolist(), strict=True) if j == client or value >= threshold - ALMOST]
