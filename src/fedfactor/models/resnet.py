"""Residual networks with basic blocks: ResNet-8, -10, -18 and -34 for small images, at any width."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal, get_args

from torch import Tensor, nn

from fedfactor.models.width import Rounding, scaled
from fedfactor.registry import register

Norm = Literal["batch", "group", "batch_no_stats"]
Stem = Literal["cifar", "imagenet"]
Shortcut = Literal["projection", "slice"]


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with normalisation, and a shortcut around them.

    Where the shape changes, the shortcut is a strided 1 x 1 convolution (`downsample`). With `shortcut="slice"`, a
    block that only reduces the channels passes on the first channels of its input instead.
    """

    def __init__(self, inp: int, out: int, stride: int, norm: Callable[[int], nn.Module], shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inp, out, 3, stride, padding=1, bias=False)
        self.bn1 = norm(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = norm(out)
        # Two modules, not F.relu, so that each has its own row in a cost table.
        self.relu1 = nn.ReLU()
        self.relu2 = nn.ReLU()
        self.out = out
        self.downsample: nn.Sequential | None = None
        self.sliced = shortcut == "slice" and stride == 1 and inp > out
        if not self.sliced and (stride != 1 or inp != out):
            self.downsample = nn.Sequential(nn.Conv2d(inp, out, 1, stride, bias=False), norm(out))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inp, h, w) to (batch, out, h / stride, w / stride)."""
        identity = x[:, : self.out] if self.sliced else x
        if self.downsample is not None:
            identity = self.downsample(x)
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.relu2(self.bn2(self.conv2(y)) + identity)
        assert isinstance(y, Tensor)
        return y


class ResNet(nn.Module):
    """A stem, stages `layer1`, `layer2`, ... of basic blocks, average pooling and `fc`.

    The stages have 64, 128, 256, 512 channels times `width`, rounded; all except the first halve the image. `planes`
    replaces the 64: it makes the full network narrower, whereas methods choose `width`. The modules have the names of
    torchvision. Input (batch, channels, height, width), output (batch, classes).

    `stem="cifar"` is a 3 x 3 convolution at full resolution, `"imagenet"` a strided 7 x 7 and a max-pooling.
    `norm="batch_no_stats"` uses the statistics of the batch in evaluation too.
    `scale_stem=False` keeps all channels of the stem at each width. Then layer1 reduces them, by a projection (FLANC)
    or, with `shortcut="slice"`, by keeping the first channels (PriSM's sub-models).
    """

    blocks: ClassVar[tuple[int, ...]]

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        stem: Stem = "cifar",
        norm: Norm = "batch",
        groups: int = 2,
        width: float = 1.0,
        rounding: Rounding = "up",
        scale_stem: bool = True,
        shortcut: Shortcut = "projection",
        planes: int = 64,
    ) -> None:
        super().__init__()
        _check("stem", stem, get_args(Stem))
        _check("norm", norm, get_args(Norm))
        _check("shortcut", shortcut, get_args(Shortcut))
        new_norm = partial(_norm, norm, groups)
        stages = [scaled(planes * 2**i, width, rounding) for i in range(len(self.blocks))]
        inp = stages[0] if scale_stem else planes
        if stem == "cifar":
            self.conv1 = nn.Conv2d(channels, inp, 3, padding=1, bias=False)
        else:
            self.conv1 = nn.Conv2d(channels, inp, 7, stride=2, padding=3, bias=False)
        self.bn1 = new_norm(inp)
        self.relu = nn.ReLU()
        self.maxpool: nn.MaxPool2d | None = nn.MaxPool2d(3, 2, padding=1) if stem == "imagenet" else None
        self.stages = len(self.blocks)
        for i, (count, out) in enumerate(zip(self.blocks, stages, strict=True)):
            stage = []
            for b in range(count):
                stage.append(BasicBlock(inp, out, 2 if i > 0 and b == 0 else 1, new_norm, shortcut))
                inp = out
            self.add_module(f"layer{i + 1}", nn.Sequential(*stage))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inp, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.relu(self.bn1(self.conv1(x)))
        if self.maxpool is not None:
            x = self.maxpool(x)
        for i in range(1, self.stages + 1):
            x = self.get_submodule(f"layer{i}")(x)
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def _norm(kind: Norm, groups: int, channels: int) -> nn.Module:
    if kind == "group":
        if channels % groups:
            raise ValueError(f"{channels} channels cannot be split into groups={groups}: change groups or width")
        return nn.GroupNorm(groups, channels)
    return nn.BatchNorm2d(channels, track_running_stats=kind == "batch")


def _check(what: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, legal))}, got {value!r}")


@register("models", "resnet8", input_shape=(3, 32, 32), paper="FedDecomp Sec. 4.1")
class ResNet8(ResNet):
    """Three stages of one block; FedDecomp uses it on CIFAR-10, with `stem="imagenet"`."""

    blocks = (1, 1, 1)


@register("models", "resnet10", input_shape=(3, 32, 32), paper="FedDecomp Sec. 4.1")
class ResNet10(ResNet):
    """Four stages of one block; FedDecomp uses it on CIFAR-100 and Tiny-ImageNet, with `stem="imagenet"`."""

    blocks = (1, 1, 1, 1)


@register("models", "resnet18", input_shape=(3, 32, 32), paper="FLANC Table 1; FedHM Table 6; PriSM Table 4")
class ResNet18(ResNet):
    """Four stages of two blocks: 11,173,962 parameters with 10 classes."""

    blocks = (2, 2, 2, 2)


@register("models", "resnet34", input_shape=(3, 32, 32), paper="FedHM Table 7")
class ResNet34(ResNet):
    """Four stages of 3, 4, 6 and 3 blocks: 21,328,292 parameters with 100 classes."""

    blocks = (3, 4, 6, 3)


# The names under which other torch libraries offer these networks.
resnet8, resnet10, resnet18, resnet34 = ResNet8, ResNet10, ResNet18, ResNet34
