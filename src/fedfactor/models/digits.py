"""The small convolutional network of the demo, for 8 x 8 digits."""

from __future__ import annotations

from torch import Tensor, nn

from fedfactor.models.width import scaled
from fedfactor.registry import register


class DigitsCNN(nn.Module):
    """Three 3 x 3 convolutions with group norm, then `fc`. Input (batch, 1, 8, 8), output (batch, classes)."""

    def __init__(self, classes: int, width: float) -> None:
        super().__init__()
        narrow, wide = scaled(64, width), scaled(128, width)
        self.features = nn.Sequential(
            *_block(1, narrow, stride=2), *_block(narrow, wide), nn.MaxPool2d(2), *_block(wide, wide), nn.Flatten()
        )
        self.fc = nn.Linear(4 * wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        logits: Tensor = self.fc(self.features(x))
        return logits


def _block(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return [conv, nn.GroupNorm(1, outputs), nn.ReLU()]


@register("models", "digits_cnn", input_shape=(1, 8, 8), paper="none: the network of the demo")
def digits_cnn(classes: int = 10, width: float = 1.0) -> DigitsCNN:
    """Return the network of the demo; `width` scales the channels."""
    return DigitsCNN(classes, width)
