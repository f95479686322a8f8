"""The small convolutional networks of FLANC (Fashion-MNIST) and PriSM (FEMNIST)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from fedfactor.models.width import scaled
from fedfactor.registry import register

Variant = Literal["paper", "code"]


class CNN4(nn.Module):
    """A first convolution (`head`), two convolutions with ReLU and max-pooling, one linear layer; no normalisation.

    Input (batch, channels, 28, 28), output (batch, classes).
    """

    def __init__(self, classes: int, width: float, channels: int, planes: int) -> None:
        super().__init__()
        out = scaled(2 * planes, width)
        self.head = nn.Conv2d(channels, planes, 3, padding=1)
        self.conv1 = nn.Conv2d(planes, out, 3, padding=1, bias=False)
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.relu2 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.fc = nn.Linear(out * 7 * 7, classes)
        for conv in (self.head, self.conv1, self.conv2):
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.pool1(self.relu1(self.conv1(self.head(x))))
        x = self.pool2(self.relu2(self.conv2(x)))
        logits: Tensor = self.fc(x.flatten(1))
        return logits


@register("models", "cnn4", input_shape=(1, 28, 28), paper="FLANC (NeurIPS 2022) Table 1, Fashion-MNIST")
def cnn4(classes: int = 10, width: float = 1.0, channels: int = 1, planes: int = 64) -> CNN4:
    """FLANC's four-layer CNN at a width: 43,978 / 105,738 / 185,930 / 284,554 parameters at 1/4, 1/2, 3/4, 1.

    `head` has `planes` channels at each width, and no activation after it.
    """
    return CNN4(classes, width, channels, planes)


class FemnistCNN(nn.Module):
    """Two convolutions, each with ReLU and max-pooling, and one linear layer.

    Input (batch, channels, 28, 28), output (batch, classes).
    """

    def __init__(self, classes: int, width: float, variant: Variant, channels: int) -> None:
        super().__init__()
        if variant not in ("paper", "code"):
            raise ValueError(f"variant must be 'paper' or 'code', got {variant!r}")
        first, kernel = (64, 3) if variant == "paper" else (32, 5)
        inner, out = scaled(first, width), scaled(64, width)
        self.conv1 = nn.Conv2d(channels, inner, 5, padding=2)
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(inner, out, kernel, padding=kernel // 2)
        self.relu2 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.fc = nn.Linear(out * 7 * 7, classes)
        for conv in (self.conv1, self.conv2):
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.pool1(self.relu1(self.conv1(x)))
        x = self.pool2(self.relu2(self.conv2(x)))
        logits: Tensor = self.fc(x.flatten(1))
        return logits


@register("models", "cnn_femnist", input_shape=(1, 28, 28), paper="PriSM (arXiv:2208.13141) Table 5")
def cnn_femnist(classes: int = 62, width: float = 1.0, variant: Variant = "paper", channels: int = 1) -> FemnistCNN:
    """PriSM's CNN for FEMNIST (Table 5): 64 kernels of 5 x 5, 64 of 3 x 3, one linear layer.

    Deviations: the table prints 10 classes, FEMNIST has 62. The authors' code has 32 and 64 kernels of 5 x 5
    (`variant="code"`). Padding that keeps the image size is taken from the code too.
    """
    return FemnistCNN(classes, width, variant, channels)
