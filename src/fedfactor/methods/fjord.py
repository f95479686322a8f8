"""FjORD: nested networks of several widths, trained by ordered dropout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from fedfactor.methods.nested import Nested
from fedfactor.methods.sliced import Sliced
from fedfactor.nn.norms import axis_blocks
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.context import Context
from fedfactor.protocol.method import Diagnostics, Participant, Traits
from fedfactor.protocol.plan import Piece, Plan, Tensors, slice_plan
from fedfactor.registry import described, register
from fedfactor.task import Batch, Build, Task


@register("methods", "fjord", paper="arXiv:2102.13451")
@dataclass(frozen=True)
class FjORD(Sliced, Diagnostics):
    """In each batch, a client of capacity p_max trains the first share p of each channel axis, p <= p_max being random.

    p is drawn uniformly from the run's capacities (and `levels`) up to p_max, one p for all layers. All widths share
    their weights, including the weight and bias of batch norms; batch statistics are separate for each width. Each
    element is averaged over the clients that hold it, weighted by examples. With `distill`, the widest network learns
    from the labels and the drawn one only from the widest network's outputs, at temperature 1, both in one step.

    Follows the code that the authors wrote for Flower. The code overwrites the weights from the largest width to the
    smallest. That is the same mean, because a client that holds an element holds all smaller widths. As in the code,
    momentum and weight decay act on all of a client's weights in each step, whatever p is.

    Deviations: the reported loss contains the divergence from the widest network's outputs, where the code has their
    cross-entropy. The gradient is the same.

    Use it where devices differ, and where a device may have to switch to a narrower network at any time: all widths
    are trained. At full width it was less accurate than HeteroFL in this project's runs.
    """

    levels: tuple[float, ...] = field(
        default=(), metadata=described("widths to draw from in addition to the run's capacities, in (0, 1]")
    )
    distill: bool = field(
        default=False, metadata=described("narrower networks learn from the outputs of the client's widest one")
    )

    masked_loss: bool = field(default=False, metadata=described("mask classes that a client lacks in its loss"))

    def __post_init__(self) -> None:
        if any(not 0 < level <= 1 for level in self.levels):
            raise ValueError(f"levels must lie in (0, 1], got {list(self.levels)}")

    @property
    def traits(self) -> Traits:
        """Clients of less capacity get a narrower network; a mask needs classes, and distillation logits."""
        return Traits(
            adapts=True,
            needs_classes="fjord's masked loss" if self.masked_loss else "",
            needs_logits="fjord's distillation" if self.distill else "",
        )

    def bind(self, task: Task, levels: Sequence[float]) -> Self:
        """Add the run's capacities to the levels."""
        return replace(self, levels=tuple(sorted({*self.levels, *levels}, reverse=True)))

    def _choices(self, capacity: float) -> list[float]:
        return [level for level in self.levels if level <= capacity]

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the client's widest network, with all narrower ones nested inside."""
        return Nested(build(capacity), {level: build(level) for level in self._choices(capacity) if level < capacity})

    def plan(self, view: Tensors, who: Participant, network: nn.Module, rng: torch.Generator | None) -> Plan:
        """Return the leading parts of the weights, and the whole statistics of each width that the client has."""
        weights = {name for name, _ in network.named_parameters()}
        own = tensors_of(network)
        plan = slice_plan(view, {name: own[name] for name in own if name in weights}, axis_blocks(network))
        for name in [name for name in own if name not in weights]:
            inner = who.capacity < 1 and name.startswith("widest.")
            plan[name] = Piece(Nested.buffer_of(who.capacity, name) if inner else name)
            if plan[name].source not in view:
                widths = ", ".join(f"{level:g}" for level in self.levels)
                raise ValueError(
                    f"fjord has batch statistics of the widths {widths}, not of {who.capacity:g}; add it to `levels`"
                )
        return plan

    def objective(self, network: nn.Module, batch: Batch, ctx: Context) -> Tensor:
        """Draw p and return the loss of that network, with `distill` plus the loss of the widest one."""
        assert isinstance(network, Nested)
        task, choices = ctx.task, self._choices(ctx.capacity)
        level = choices[int(torch.randint(len(choices), ()))]  # the job has seeded the global generator
        drawn = partial(network.at, level)
        only = ctx.labels if self.masked_loss else None
        if not self.distill:
            return task.loss(task.outputs(drawn, batch), batch, only=only)
        full = task.outputs(network, batch)
        return task.loss(full, batch, only=only) + task.divergence(task.outputs(drawn, batch), full)

    def passes(self, capacity: float) -> dict[float, float]:
        """Return one pass at the drawn width (its expectation), and with `distill` one of the widest network."""
        choices = self._choices(capacity)
        drawn = {level: 1 / len(choices) for level in choices}
        return {**drawn, capacity: drawn.get(capacity, 0.0) + self.distill}

    def deploy(self, server: Tensors, network: nn.Module, capacity: float, kept: Tensors) -> nn.Module:
        """Return the network of this width without the narrower ones."""
        nested = super().deploy(server, network, capacity, kept)
        assert isinstance(nested, Nested)
        return nested.widest
