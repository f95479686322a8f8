"""FjORD: networks inside networks, trained by ordered dropout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, nn

from fedfactor.methods.nested import Nested
from fedfactor.methods.sliced import Sliced
from fedfactor.nn.norms import axis_blocks
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Diagnostics, Participant
from fedfactor.protocol.plan import Piece, Plan, Tensors, slice_plan
from fedfactor.registry import described, register
from fedfactor.task import Build, Task


@register("methods", "fjord", paper="arXiv:2102.13451")
@dataclass(frozen=True)
class FjORD(Sliced, Diagnostics):
    """A client of capacity p_max trains, in each batch, the first p of every channel axis, p drawn up to p_max.

    p is drawn uniformly from the run's capacities (and `levels`) that the client can carry, one for all layers. Weights
    of all widths are the same numbers; of batch norms, weight and bias too, but statistics are kept a width. Elements
    are averaged over their holders by data, which is what overwriting from the largest width to the smallest comes to:
    who holds an element holds every smaller width.

    Definition not re-read in the paper; it follows what its authors wrote for Flower. With `distill` the widest network
    learns from the labels and the drawn one from the widest's answers alone, at temperature 1, both in one step.

    Deviations: momentum and weight decay act on all of a client's weights in every step, whatever p is (as there). The
    loss that is reported has the divergence from the widest network's answers where the original has their cross
    entropy: the gradient is the same.

    Use it where devices differ, and where a device may want a narrower network at a moment's notice: every width
    inside is trained. In the runs here it was behind HeteroFL at full width.
    """

    levels: tuple[float, ...] = field(
        default=(), metadata=described("widths to draw from beside the run's capacities, in (0, 1]")
    )
    distill: bool = field(default=False, metadata=described("narrower networks learn from the client's widest one"))

    def __post_init__(self) -> None:
        if any(not 0 < level <= 1 for level in self.levels):
            raise ValueError(f"levels must lie in (0, 1], got {list(self.levels)}")

    def bind(self, task: Task, levels: Sequence[float]) -> Self:
        """Draw from the run's capacities too."""
        return replace(self, levels=tuple(sorted({*self.levels, *levels}, reverse=True)))

    def _choices(self, capacity: float) -> list[float]:
        return [level for level in self.levels if level <= capacity]

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Build the widest network that the client can carry, with all narrower ones inside."""
        return Nested(build(capacity), {level: build(level) for level in self._choices(capacity) if level < capacity})

    def plan(self, view: Tensors, who: Participant, network: nn.Module, rng: torch.Generator | None) -> Plan:
        """Take leading parts of the weights, and whole the statistics of every width that the client has."""
        weights = {name for name, _ in network.named_parameters()}
        own = tensors_of(network)
        plan = slice_plan(view, {name: own[name] for name in own if name in weights}, axis_blocks(network))
        for name in [name for name in own if name not in weights]:
            inner = who.capacity < 1 and name.startswith("widest.")
            plan[name] = Piece(Nested.buffer_of(who.capacity, name) if inner else name)
            if plan[name].source not in view:
                widths = ", ".join(f"{level:g}" for level in self.levels)
                raise ValueError(f"fjord has batch statistics of the widths {widths}, not of {who.capacity:g}")
        return plan

    def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Draw p and return the loss of that network; distilling, of the widest one too."""
        assert isinstance(network, Nested)
        (x, y), choices = batch, self._choices(ctx.capacity)
        level = choices[int(torch.randint(len(choices), ()))]  # from the job's own seed
        if not self.distill:
            return ctx.task.loss(network.at(level, x), y)
        full = network(x)
        return ctx.task.loss(full, y) + ctx.task.divergence(network.at(level, x), full)

    def passes(self, capacity: float) -> dict[float, float]:
        """One at the drawn width, as expected, and one of the teacher's."""
        choices = self._choices(capacity)
        drawn = {level: 1 / len(choices) for level in choices}
        return {**drawn, capacity: drawn.get(capacity, 0.0) + self.distill}

    def deploy(self, server: Tensors, network: nn.Module, capacity: float, kept: Tensors) -> nn.Module:
        """Return the network of this width alone."""
        nested = super().deploy(server, network, capacity, kept)
        assert isinstance(nested, Nested)
        return nested.widest
