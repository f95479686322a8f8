"""FedRolex: narrower networks whose window of channels advances in each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fedfactor.methods.heterofl import HeteroFL
from fedfactor.nn.norms import axis_blocks
from fedfactor.protocol.method import Participant, Traits
from fedfactor.protocol.plan import AxisIndex, Plan, Tensors
from fedfactor.registry import register


@register("methods", "fedrolex", paper="arXiv:2212.01548")
@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """In round j, a client of capacity p trains the channels j, j + 1, ..., j + ceil(p N) - 1 (mod N) of each layer.

    The window advances by one channel in each round (Eq. 2 and 3), so that all parts of the server's model are trained
    evenly, also where it is larger than each client's. Each element is averaged over the clients that held it in the
    round; the others do not change. Everything else is HeteroFL, from which the authors' code is derived.

    The server's full model is measured, and for each capacity the network of its first channels, which no client may
    have trained together.

    Use it where the server's model is larger than each client's.
    """

    @property
    def traits(self) -> Traits:
        """Those of HeteroFL, with a window that moves."""
        return replace(super().traits, moves=True)

    def plan(self, view: Tensors, who: Participant, network: nn.Module, rng: torch.Generator | None) -> Plan:
        """Shift the leading part of each axis to the round's window; for use, not training, return the leading part."""
        plan = super().plan(view, who, network, rng)
        if rng is None:
            return plan
        blocks, positions = axis_blocks(network), _positions(view, plan)

        def rolled(name: str, axis: int, part: AxisIndex) -> AxisIndex:
            if part is None:
                return None
            window = torch.arange(part) if isinstance(part, int) else part
            count = (*blocks.get(name, ()), 1, 1)[axis] if axis < 2 else 1
            block = view[plan[name].source].shape[axis] // count
            shift = who.round * (positions.get(name, 1) if axis == 1 else 1)
            return (window % block + shift) % block + window // block * block

        return {
            name: replace(piece, index=tuple(rolled(name, axis, part) for axis, part in enumerate(piece.index)))
            for name, piece in plan.items()
        }

    def served(self, levels: Sequence[float]) -> list[float]:
        """Return full capacity and the clients' capacities."""
        return sorted({1.0, *levels}, reverse=True)


def _positions(view: Tensors, plan: Plan) -> dict[str, int]:
    """Return how many inputs of a linear layer each channel has, where it reads the flattened maps of a convolution."""
    found, before = dict[str, int](), torch.empty(0)
    for name, piece in plan.items():
        weight = view[piece.source]
        if weight.dim() == 2 and before.dim() > 2 and weight.shape[1] % len(before) == 0:
            found[name] = weight.shape[1] // len(before)
        before = weight if weight.dim() > 1 else before
    return found
