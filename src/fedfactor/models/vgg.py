"""VGG16 with group normalisation (FedPara)."""

from __future__ import annotations

from torch import Tensor, nn

from fedfactor.registry import register

# Output channels of the 13 convolutions, as multiples of the first; 0 is a 2 x 2 max-pooling.
_LAYOUT = (1, 1, 0, 2, 2, 0, 4, 4, 4, 0, 8, 8, 8, 0, 8, 8, 8, 0)


class VGG(nn.Module):
    """Convolutions with bias, GroupNorm and ReLU, then a classifier of three fully connected layers.

    Input (batch, channels, height, width), 32 x 32 in the paper; output (batch, classes).
    """

    def __init__(self, classes: int, groups: int, dropout: float, channels: int, planes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for out in (planes * multiple for multiple in _LAYOUT):
            if out == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(groups, out), nn.ReLU()]
            channels = out
        self.features = nn.Sequential(*layers)
        # Has no effect at 32 x 32 pixels; needed for larger images.
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(channels, channels),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(channels, channels),
            nn.ReLU(),
            nn.Linear(channels, classes),
        )
        for module in self.features:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        logits: Tensor = self.classifier(self.pool(self.features(x)).flatten(1))
        return logits


@register("models", "vgg16", input_shape=(3, 32, 32), paper="FedPara (arXiv:2108.06098) C.2")
def vgg16(classes: int = 10, groups: int = 2, dropout: float = 0.5, channels: int = 3, planes: int = 64) -> VGG:
    """FedPara's VGG16 (C.2, Table 5): 15.25 M parameters with 10 classes, 15.30 M with 100.

    The paper replaces batch by group normalisation and does not give the number of groups; two is the number of
    Flower's reproduction. `planes` are the channels of the first convolution; fewer make all layers smaller.
    """
    return VGG(classes, groups, dropout, channels, planes)
