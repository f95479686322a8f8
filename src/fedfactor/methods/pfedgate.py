"""pFedGate: a private gate switches pieces of the shared model on and off, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from torch import nn

from fedfactor.methods.gated import Gated
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.method import Group, Method, Phase, Traits, parameter_names
from fedfactor.registry import described, register
from fedfactor.task import Build, Task


@register("methods", "pfedgate", paper="arXiv:2305.02776")
@dataclass(frozen=True)
class PFedGate(Method):
    """The model theta is shared and averaged by data; a gate network phi_i stays on the client.

    Every tensor of theta is cut into `pieces` of consecutive entries. For a batch, the gate gives each piece a score in
    (0, 1), the mean over the batch; within the budget the pieces of highest score are kept, the others are zero, and
    what is kept is multiplied by its score. Both networks train together. A client of capacity p may keep p times the
    budget. A prediction depends on the other examples of its batch, and so does what is deployed: a gated model.

    Definition not re-read in the paper: it follows the authors' code with its shipped settings (joint training, greedy
    choice), see `chosen`. As there, theta travels whole, and no multiplication is saved: kept pieces are not gathered.
    Three faults of that code are not here: schedules that look at test accuracy, a ReLU on the logits, and means over
    clients that did not take part.

    Use it to study sparse personal models: nothing is saved on the wire, and a prediction depends on its batch.
    """

    budget: float = field(default=0.5, metadata=described("s: share of the parameters that a batch may use"))
    pieces: int = field(default=5, metadata=described("B: pieces a tensor is cut into"))
    gate_pace: float = field(default=1.0, metadata=described("learning rate of the gate / that of the model"))
    inputs: tuple[int, ...] = field(default=(), metadata=described("shape of an input; not given: the data's"))

    def __post_init__(self) -> None:
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget must lie in (0, 1], got {self.budget:g}")
        if self.pieces < 1:
            raise ValueError(f"pieces must be at least 1, got {self.pieces}")

    @property
    def traits(self) -> Traits:
        """Weights depend on the batch, so no deployed model is made of ordinary layers."""
        return Traits(plain=False)

    def bind(self, task: Task, levels: Sequence[float]) -> Self:
        """The gate looks at inputs of one shape."""
        example = task.data.example
        if not example.is_floating_point():
            raise ValueError("pfedgate's gate looks at pictures or other numbers, but these inputs are tokens")
        return replace(self, inputs=tuple(example.shape))

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Put a gate before the task's model."""
        return Gated(build(1.0), self.inputs, self.pieces, self.budget * capacity)

    def private_names(self, network: nn.Module) -> set[str]:
        """The gate."""
        return {name for name in tensors_of(network) if name.startswith("gate.")}

    def phases(self, network: nn.Module, epochs: int) -> list[Phase]:
        """The gate may have a learning rate of its own."""
        gate = self.private_names(network)
        model = [name for name in parameter_names(network) if name not in gate]
        return [Phase(epochs, [Group(model), Group(gate, lr_factor=self.gate_pace)])]
