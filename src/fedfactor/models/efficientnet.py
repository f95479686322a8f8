"""EfficientNet-Lite0, whose tensors have the names of the weights that are published for PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedfactor.registry import register

STAGES = (
    (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112), (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)  # fmt: skip
"""Blocks, kernel, stride of the first block, expansion and output channels of each stage."""
STEM, HEAD = 32, 1280


class SameConv(nn.Conv2d):
    """A convolution with TensorFlow's padding "same": an odd number of rows or columns more is added at the end."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve to ceil(size / stride) pixels per side."""
        padding: list[int] = []
        for size, kernel, stride in zip(input.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            padding += [total // 2, total - total // 2]
        return super().forward(F.pad(input, padding))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class Block(nn.Module):
    """An inverted bottleneck: 1 x 1 to more channels, one filter per channel, 1 x 1 to fewer; ReLU6."""

    def __init__(self, inp: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        middle = inp * expansion
        self.expands, self.skips = expansion != 1, stride == 1 and inp == out
        if self.expands:
            self._expand_conv, self._bn0 = nn.Conv2d(inp, middle, 1, bias=False), _norm(middle)
        self._depthwise_conv = SameConv(middle, middle, kernel, stride, groups=middle, bias=False)
        self._bn1 = _norm(middle)
        self._project_conv, self._bn2 = nn.Conv2d(middle, out, 1, bias=False), _norm(out)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inp, h, w) to (batch, out, ceil(h / stride), ceil(w / stride))."""
        inner = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        inner = F.relu6(self._bn1(self._depthwise_conv(inner)))
        inner = self._bn2(self._project_conv(inner))
        out: Tensor = x + inner if self.skips else inner
        return out


@register("models", "efficientnet_lite0", input_shape=(3, 224, 224), paper="arXiv:1905.11946, without attention")
class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 for pre-trained weights: 4,652,008 parameters with 1,000 classes.

    The published weights are for images of 224 x 224 pixels, normalised to (x - 127) / 128. With `size`, images are
    first resized to that many pixels per side, which should be several times 32.
    """

    def __init__(self, classes: int = 10, size: int = 0, dropout: float = 0.2) -> None:
        super().__init__()
        self.size = size
        self._conv_stem, self._bn0 = SameConv(3, STEM, 3, 2, bias=False), _norm(STEM)
        self._blocks, inp = nn.ModuleList(), STEM
        for blocks, kernel, stride, expansion, out in STAGES:
            for number in range(blocks):
                self._blocks.append(Block(inp, out, kernel, 1 if number else stride, expansion))
                inp = out
        self._conv_head, self._bn1 = nn.Conv2d(inp, HEAD, 1, bias=False), _norm(HEAD)
        self._dropout = nn.Dropout(dropout)
        self._fc = nn.Linear(HEAD, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        if self.size:
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False)
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        x = F.relu6(self._bn1(self._conv_head(x)))
        logits: Tensor = self._fc(self._dropout(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)))
        return logits


efficientnet_lite0 = EfficientNetLite0
