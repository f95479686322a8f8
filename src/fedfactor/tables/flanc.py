"""FLANC (NeurIPS 2022), Table 1: parameters that a client of each width sends and receives."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedfactor.factor.base import Scheme
from fedfactor.factor.composition import Composition
from fedfactor.nn import factorize
from fedfactor.tables.counting import network, parameters
from fedfactor.tables.printed import PRINTED
from fedfactor.tables.row import Row

WIDTHS = (0.25, 0.5, 0.75, 1.0)
LABELS = ("x 0.25", "x 0.50", "x 0.75", "x 1.0", "Avg")

# R1 is an eighth of the inputs at full width (half of the narrowest network's), R2 a quarter of the stage's
# outputs; both convolutions of a block have the same R1. Stem, shortcuts, norms and classifier stay dense.
RESNET_BASES: dict[str, Scheme | None] = {
    "layer1.*.conv*": Composition(r1=8, r2=16),
    "layer2.0.conv*": Composition(r1=8, r2=32),
    "layer2.1.conv*": Composition(r1=16, r2=32),
    "layer3.0.conv*": Composition(r1=16, r2=64),
    "layer3.1.conv*": Composition(r1=32, r2=64),
    "layer4.0.conv*": Composition(r1=32, r2=128),
    "layer4.1.conv*": Composition(r1=64, r2=128),
}
CNN_BASES: dict[str, Scheme | None] = {"conv1": Composition(r1=8, r2=32), "conv2": Composition(r1=16, r2=32)}
RNN_BASIS = Composition(r1=32, r2=30)

RNN_NOTE = "the paper gives no cell: an LSTM of 512p inputs and 256p units with one bias fits all cells except 214 K"


def rows() -> list[Row]:
    """Recompute both communication columns of Table 1, and the share of Figure 1's caption."""
    counters: dict[str, Callable[[str, float], int]] = {
        "CIFAR10": lambda column, width: _resnet(column, width, 10),
        "CIFAR100": lambda column, width: _resnet(column, width, 100),
        "Fashion-MNIST": _cnn,
        "Shakespeare": _rnn,
    }
    found = []
    for dataset, column, printed in (
        (dataset, *line) for dataset, columns in PRINTED["flanc"].items() for line in columns.items()
    ):
        counts: list[float] = [counters[dataset](column, width) for width in WIDTHS]
        note = RNN_NOTE if dataset == "Shakespeare" else ""
        for label, ours, text in zip(LABELS, [*counts, sum(counts) / len(counts)], printed, strict=True):
            found.append(Row("flanc", "Table 1", f"{dataset} {label}", f"{column} parameters", ours, text, note))
    small, full = (_resnet("p-width", width, 10) for width in (0.25, 1.0))
    share = 100 * (1 - small / full)
    found.append(Row("flanc", "Figure 1", "ResNet-18, x 1.0", "parameters not in x 0.25", share, "> 90 %"))
    return found


def _resnet(column: str, width: float, classes: int) -> int:
    if column == "p-width":
        return parameters(network("resnet18", classes=classes, width=width))
    # FLANC's stem has 64 channels at every width, so that the first block narrows by a projection.
    model = network("resnet18", classes=classes, width=width, scale_stem=False)
    return parameters(factorize(model, Composition(), skip=_dense(model), per_layer=RESNET_BASES))


def _dense(model: nn.Module) -> list[str]:
    shortcuts = [name for name, _ in model.named_modules() if name.endswith("downsample.0")]
    return ["conv1", "fc", *shortcuts]


def _cnn(column: str, width: float) -> int:
    model = network("cnn4", width=width)
    if column == "p-width":
        return parameters(model)
    return parameters(factorize(model, Composition(), skip=["head", "fc"], per_layer=CNN_BASES))


def _rnn(column: str, width: float) -> int:
    """Count only the LSTM, without torch's second bias: the table omits embedding and decoder."""
    lstm = network("rnn_shakespeare", width=width).get_submodule("lstm")
    second_bias = lstm.get_parameter("bias_hh_l0").numel()
    return parameters(lstm if column == "p-width" else factorize(lstm, RNN_BASIS)) - second_bias
