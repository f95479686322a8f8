"""FedCAC: what matters to a client is averaged with clients to whom the same matters, the rest with all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedfactor.nn.state import tensors_of
from fedfactor.protocol.method import Method, Networks, Participant, Traits
from fedfactor.protocol.plan import Held, Plan, Reply, Tensors, holders_mean, pull
from fedfactor.protocol.states import HeldTensors
from fedfactor.registry import described, register

MASK = "critical:"
"""Prefix of the masks that the server keeps beside a client's tensors."""
CHUNK = 1 << 22
"""Entries of all clients together whose overlaps are counted at once: float32 counts them exactly."""
ALMOST = 1e-9
"""Overlaps are ratios of counts: those that differ, differ by more than this."""


@register("methods", "fedcac", paper="arXiv:2309.11103")
@dataclass(frozen=True)
class FedCAC(Method):
    """The server keeps every client's model theta_i and a mask M_i of its critical parameters.

    Critical is the tau of a tensor whose sensitivity |(theta_i - theta_i^start) theta_i| over the round is largest.
    O_ij = 1 - |M_i - M_j| / (2 |M_i|) is how much the masks of two clients overlap. After round t client i collaborates
    with C_i, itself and all j with O_ij >= T_t = mean O + (t / beta) (max O - mean O), so with ever fewer. It gets
    M_i cust_i + (1 - M_i) global: cust_i is the plain mean over C_i, global the mean by data over the round's clients.
    Only weights are mixed; norm statistics stay on the client.

    Definition not re-read in the paper: it follows the authors' code.

    Deviations: the code's clients send their masks, one bit a parameter; here the server finds them from what it sent
    and what came back, so with a lossy codec they are those of the decoded update. With partial participation, clients
    that never took part get the global model, and others stay in the mix as they were last seen.

    Use it where clients differ, but not in all: weights that matter to a client are shared with like clients only.
    Every client should take part often, since others see it as it was last.
    """

    tau: float = field(default=0.5, metadata=described("share of critical parameters in a tensor"))
    beta: int = field(default=100, metadata=described("rounds until only the clients most alike collaborate"))

    def __post_init__(self) -> None:
        if not 0 <= self.tau <= 1:
            raise ValueError(f"tau must lie in [0, 1], got {self.tau:g}")
        if not self.beta > 0:
            raise ValueError(f"beta must be above 0, got {self.beta}")

    @property
    def traits(self) -> Traits:
        """What others need to know about this method."""
        return Traits(space="personal")

    def private_names(self, network: nn.Module) -> set[str]:
        """Buffers, such as norm statistics."""
        weights = {name for name, _ in network.named_parameters()}
        return {name for name in tensors_of(network) if name not in weights}

    def download(self, view: Tensors, who: Participant, plan: Plan, held: HeldTensors, network: nn.Module) -> Tensors:
        """Mix M_i cust_i + (1 - M_i) global."""
        if who.client not in held:
            return pull(view, plan)
        friends = collaborators(held.once(overlaps), list(held), who.client, who.round / self.beta)
        own, mixed = held[who.client], {}
        for name in plan:
            custom = torch.zeros_like(own[name])
            for friend in friends:
                custom += held[friend][name] / len(friends)
            mixed[name] = torch.where(own[MASK + name], custom, view[name])
        return mixed

    def aggregate(
        self, server: Tensors, view: Tensors, replies: Sequence[Reply], networks: Networks
    ) -> tuple[Tensors, Held]:
        """Return the mean of the models themselves: clients started from different ones, so changes would not do."""
        absolute = [replace(reply, reference={name: view[name] for name in reply.tensors}) for reply in replies]
        return holders_mean(view, absolute, self.weights(replies))

    def remember(self, replies: Sequence[Reply]) -> dict[int, Tensors]:
        """The server keeps every client's latest model and its mask."""
        return {
            reply.client: reply.tensors
            | {MASK + name: critical(reply.reference[name], reply.tensors[name], self.tau) for name in reply.tensors}
            for reply in replies
        }


def critical(start: Tensor, trained: Tensor, share: float) -> Tensor:
    """Mark the share of a tensor whose sensitivity |(theta - theta^start) theta| is largest; ties are in."""
    sensitivity = ((trained - start) * trained).abs()
    count = int(share * sensitivity.numel())
    if not count or not sensitivity.any():
        return torch.zeros_like(sensitivity, dtype=torch.bool)
    threshold = sensitivity.flatten().topk(count).values[-1]
    if threshold <= 1e-10:  # fewer entries moved than were to be marked: mark those
        threshold = sensitivity[sensitivity > 0].min()
    return sensitivity >= threshold


def overlaps(held: Mapping[int, Tensors]) -> Tensor:
    """Return O_ij for all clients in their order; 0 where a client has no critical parameter."""
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
    """Return C_i, client i and all whose masks overlap with its own by T_t or more; `progress` is t / beta."""
    others = overlap[~torch.eye(len(clients), dtype=torch.bool)]
    if not len(others):
        return [client]
    mean, largest = float(others.mean()), float(others.max())
    threshold = mean + progress * (largest - mean)
    row = overlap[clients.index(client)]
    return [j for j, value in zip(clients, row.tolist(), strict=True) if j == client or value >= threshold - ALMOST]
