"""Two fully connected layers (pFedPara)."""

from __future__ import annotations

from torch import Tensor, nn

from fedfactor.models.width import scaled
from fedfactor.registry import register


class MLP(nn.Module):
    """`fc1`, ReLU, `fc2`. Input (batch, ...), flattened to `inputs` features; output (batch, classes)."""

    def __init__(self, inputs: int, hidden: int, classes: int, width: float) -> None:
        super().__init__()
        hidden = scaled(hidden, width)
        self.fc1 = nn.Linear(inputs, hidden)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of examples."""
        logits: Tensor = self.fc2(self.relu(self.fc1(x.flatten(1))))
        return logits


@register("models", "mlp", input_shape=(1, 28, 28), paper="FedPara (arXiv:2108.06098) C.2, two FC layers")
def mlp(inputs: int = 784, hidden: int = 256, classes: int = 10, width: float = 1.0) -> MLP:
    """Return the network of FedPara's personalisation experiments (C.2): 256 hidden units, no other layers.

    `width` scales the hidden units.
    """
    return MLP(inputs, hidden, classes, width)
