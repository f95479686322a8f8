"""pFedGate: a private gate turns pieces of the shared model on and off for each batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from torch import nn

from fedfactor.methods.gated import Gated
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.method import Method, ParameterGroup, Phase, Traits, parameter_names
from fedfactor.registry import described, register
from fedfactor.task import Build, Task


@register("methods", "pfedgate", paper="arXiv:2305.02776")
@dataclass(frozen=True)
class PFedGate(Method):
    """The model theta is shared and averaged, weighted by examples; a gate network phi_i stays on the client.

    Each tensor of theta is divided into `pieces` of consecutive entries. For each batch, the gate gives each piece a
    score in (0, 1), the mean over the batch. Within the budget, the pieces with the highest scores are kept and
    multiplied by their score; the others are zero. Both networks are trained together. A client of capacity p may keep
    p times the budget. The deployed model is gated too, so a prediction depends on the other examples of its batch.

    Follows the authors' code with its shipped settings (joint training, greedy choice; see `chosen`). As in the code,
    clients upload and download all of theta, and the number of multiplications stays the same. Three faults of the code
    are fixed: its schedules use test accuracy, it applies a ReLU to the logits, and its mean includes clients that did
    not take part.

    Use it to study sparse personal models. It saves no bytes, and a prediction depends on its batch.
    """

    untunable: ClassVar[str] = "its gates scale blocks of the whole weights"

    budget: float = field(default=0.5, metadata=described("s: share of the parameters that a batch may use"))
    pieces: int = field(default=5, metadata=described("B: number of pieces per tensor"))
    gate_pace: float = field(default=1.0, metadata=described("learning rate of the gate / learning rate of the model"))
    inputs: tuple[int, ...] = field(default=(), metadata=described("shape of an input; default: taken from the data"))

    def __post_init__(self) -> None:
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget must lie in (0, 1], got {self.budget:g}")
        if self.pieces < 1:
            raise ValueError(f"pieces must be at least 1, got {self.pieces}")

    @property
    def traits(self) -> Traits:
        """Weights depend on the batch, so deployed models do not consist of ordinary layers."""
        return Traits(plain=False)

    def bind(self, task: Task, levels: Sequence[float]) -> Self:
        """Set the shape of the gate's inputs. Raise ValueError if the inputs are not one tensor of real numbers."""
        if not task.data.takes_tensor or not (example := task.data.example).is_floating_point():
            raise ValueError("pfedgate's gate needs one tensor of real numbers, such as images, as the model's input")
        return replace(self, inputs=tuple(example.shape))

    def network(self, build: Build, capacity: float) -> nn.Module:
        """Return the task's model with a gate."""
        return Gated(build(1.0), self.inputs, self.pieces, self.budget * capacity)

    def trained_capacity(self, capacity: float) -> float:
        """Return the capacity itself: it limits the pieces that a batch trains, although the network is the same."""
        return capacity

    def private_names(self, network: nn.Module) -> set[str]:
        """Return the names of the gate's tensors."""
        return {name for name in tensors_of(network) if name.startswith("gate.")}

    def phases(self, network: nn.Module, epochs: float) -> list[Phase]:
        """Train model and gate together, the gate with its own learning rate."""
        gate = self.private_names(network)
        model = [name for name in parameter_names(network) if name not in gate]
        return [Phase(epochs, [ParameterGroup(model), ParameterGroup(gate, lr_factor=self.gate_pace)])]
