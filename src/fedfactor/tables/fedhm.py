"""FedHM: parameters and multiply-accumulates of low-rank and slim ResNets.

A low-rank network of factor f has rank round(O / f) in each factorised layer of O outputs (f = 1: the plain network).
Not factorised are the stem, the first block of ResNet-18 or the first two stages of ResNet-34 (Tables 6 and 7), the
1 x 1 shortcuts and the classifier. MACs are counted as the tool ptflops does, which reproduces every printed digit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import nn

from fedfactor.cost import measure, ptflops_macs
from fedfactor.factor.spectral import ChannelSplit, SpatialSplit
from fedfactor.nn import factorize
from fedfactor.tables.counting import images, network, parameters
from fedfactor.tables.printed import PRINTED
from fedfactor.tables.row import Row

M, N, K, R, SIDE = 256, 256, 3, 64, 8
"""Sizes at which the formulas of Table 1 are evaluated: inputs, outputs, kernel, rank, image side."""

DENSE = {"resnet18": ("conv1", "layer1.0"), "resnet34": ("conv1", "layer1", "layer2")}
SHORTCUTS_AND_CLASSIFIER = ("*.downsample.0", "fc")


@dataclass(frozen=True)
class Network:
    """A network of the tables: low-rank with a factor, or slim with a width."""

    base: str
    classes: int
    side: int
    factor: int = 1
    width: float = 1.0

    @property
    def label(self) -> str:
        """The width, or the share of ranks; the full network is 1 in both families."""
        return f"1/{self.factor}" if self.factor > 1 else f"{self.width:g}"

    @property
    def model(self) -> nn.Module:
        """The network on the meta device."""
        if self.factor == 1:
            return network(self.base, classes=self.classes, width=self.width, rounding="nearest")
        plain = network(self.base, classes=self.classes)
        skip = (*DENSE[self.base], *SHORTCUTS_AND_CLASSIFIER)
        return factorize(plain, SpatialSplit(ratio=1 / self.factor), skip=skip)


# Network, classes and side of the images.
BASES = {
    "CIFAR-10": ("resnet18", 10, 32),
    "CIFAR-100": ("resnet34", 100, 32),
    "Tiny-ImageNet": ("resnet34", 200, 64),
}
# Printed parameters and MACs by data set, then by factor of the rank or by width.
LOW_RANK = {
    dataset: {int(factor): (size, work) for factor, (size, work) in table.items()}
    for dataset, table in PRINTED["fedhm"]["low_rank"].items()
}
SLIM = {
    dataset: {float(width): (size, work) for width, (size, work) in table.items()}
    for dataset, table in PRINTED["fedhm"]["slim"].items()
}


def rows() -> list[Row]:
    """Recompute Tables 1, 2, 3, 4, 8 and 9, Figure 8's shares and the reductions of Sections 4.4 and C.1."""
    return [
        *_table_1(),
        *_parameter_table("Table 2", ("CIFAR-10", "CIFAR-100"), settings=2),
        *_parameter_table("Table 3", ("CIFAR-10", "CIFAR-100"), settings=2),
        *_table_4(),
        *_section_4_4(),
        *_figure_8(),
        *_table_8(),
        *_parameter_table("Table 9", ("Tiny-ImageNet",), settings=4),
        *_section_c_1(),
    ]


def _table_1() -> Iterator[Row]:
    """Evaluate the printed formulas and count real layers of the same sizes."""
    linear = nn.Linear(M, N, bias=False, device="meta")
    conv = nn.Conv2d(M, N, K, padding=K // 2, bias=False, device="meta")
    spatial, channel = SpatialSplit(rank=R), ChannelSplit(rank=R)
    vector, image, area = torch.empty(1, M, device="meta"), images(1, SIDE, M), SIDE * SIDE
    # The layer, its input, and the printed formulas: parameters, and operations per position.
    lines = {
        "Vanilla FC": (linear, vector, M * N),
        "Factorized FC": (factorize(linear, spatial), vector, R * (M + N)),
        "Vanilla Conv.": (conv, image, M * N * K**2),
        "Factorized Conv.": (factorize(conv, spatial), image, R * K * (M + N)),
        "Factorized Conv. in [32]": (factorize(conv, channel), image, R * (M * K**2 + N)),
    }
    note = f"the printed formula at m = {M}, n = {N}, k = {K}, r = {R}, H = W = {SIDE}"
    cell = partial(Row, "fedhm", "Table 1", note=note)
    for label, (layer, example, formula) in lines.items():
        cost, positions = measure(layer, example), area if example is image else 1
        yield cell(label, "parameters", cost.parameters, f"{formula:,}")
        yield cell(label, "MACs", cost.macs, f"{formula * positions:,}")


def _parameter_table(table: str, datasets: tuple[str, ...], settings: int) -> Iterator[Row]:
    """Compare the parameters of both families. A figure that is printed in several cells is compared once."""
    cell = partial(Row, "fedhm", table)
    for dataset in datasets:
        # HeteroFL has all widths; V2, V3 and Width Slimming lack the largest one, two and three.
        for columns, (width, (printed, _)) in enumerate(SLIM[dataset].items(), start=1):
            net, note = _slim(dataset, width), f"in {columns * settings} cells"
            yield cell(f"{dataset}, HeteroFL {net.label}", "parameters", _parameters(net), printed, note)
        for factor, (printed, _) in LOW_RANK[dataset].items():
            net, note = _low_rank(dataset, factor), f"in {settings} cells"
            yield cell(f"{dataset}, FedHM {net.label}", "parameters", _parameters(net), printed, note)


def _table_4() -> Iterator[Row]:
    """Compare FedHM, its V2 and V3, and the smallest low-rank model."""
    cell = partial(Row, "fedhm", "Table 4")
    for columns, (factor, (printed, _)) in enumerate(LOW_RANK["CIFAR-10"].items(), start=1):
        net, note = _low_rank("CIFAR-10", factor), f"in {2 * columns} cells"
        yield cell(f"CIFAR-10, FedHM {net.label}", "parameters", _parameters(net), printed, note)


def _section_4_4() -> Iterator[Row]:
    """Count the models without dense layers in front, in which every convolution has rank k."""
    for dataset in ("CIFAR-10", "CIFAR-100"):
        full = _slim(dataset, 1.0).model
        least = factorize(full, SpatialSplit(rank=K), skip=SHORTCUTS_AND_CLASSIFIER)
        share = 100 * parameters(least) / parameters(full)
        yield Row("fedhm", "Section 4.4", f"{dataset}, rank {K} everywhere", "parameters / full", share, "2 %")


def _figure_8() -> Iterator[Row]:
    """Compare the shares of layer3 and layer4 with the text above Figure 8."""
    cell = partial(Row, "fedhm", "Figure 8")
    for dataset in ("CIFAR-10", "CIFAR-100"):
        net = _slim(dataset, 1.0)
        stages = nn.Sequential(net.model.get_submodule("layer3"), net.model.get_submodule("layer4"))
        label = f"{net.base}, layer3 and layer4"
        share = 100 * parameters(stages) / _parameters(net)
        yield cell(label, "parameters / all", share, "> 93 %")
    # Input of layer3: 128 channels at half the side of the image.
    work = ptflops_macs(stages, images(1, net.side // 2, 128))
    yield cell(label, "MACs / all", 100 * work / _macs(net), "55.6 %")


def _table_8() -> Iterator[Row]:
    """Compare parameters and MACs. IID and non-IID print the same figures, except one pair of cells."""
    cell = partial(Row, "fedhm", "Table 8")
    for dataset in BASES:
        low = [("low rank", _low_rank(dataset, f), *text) for f, text in LOW_RANK[dataset].items()]
        slim = [("slim", _slim(dataset, width), *text) for width, text in SLIM[dataset].items()]
        for family, net, size, work in [*low, *slim]:
            yield cell(f"{dataset}, {family} {net.label}", "parameters", _parameters(net), size)
            yield cell(f"{dataset}, {family} {net.label}", "MACs", _macs(net), work)
    full, note = _slim("CIFAR-10", 1.0), "these two cells are exchanged in print"
    yield cell("CIFAR-10 non-IID, low rank 1", "MACs", _macs(full), "11.17 M", note)
    yield cell("CIFAR-10 non-IID, slim 1", "parameters", _parameters(full), "557.22 M", note)


def _section_c_1() -> Iterator[Row]:
    """Divide the full networks by the smallest low-rank ones of Table 8."""
    cell = partial(Row, "fedhm", "Section C.1")
    for dataset, factor, text in (("CIFAR-100", 12, "7.8 x"), ("CIFAR-10", 8, "9.0 x")):
        full, small = _slim(dataset, 1.0), _low_rank(dataset, factor)
        gain = _parameters(full) / _parameters(small)
        yield cell(f"{dataset}, full / low rank {small.label}", "parameters", gain, text)
    full, small = _slim("CIFAR-100", 1.0), _low_rank("CIFAR-100", 12)
    yield cell("CIFAR-100, full / low rank 1/12", "MACs", _macs(full) / _macs(small), "2.0 x")


def _slim(dataset: str, width: float) -> Network:
    return Network(*BASES[dataset], width=width)


def _low_rank(dataset: str, factor: int) -> Network:
    return Network(*BASES[dataset], factor=factor)


@cache
def _parameters(net: Network) -> int:
    return parameters(net.model)


@cache
def _macs(net: Network) -> int:
    return ptflops_macs(net.model, images(1, net.side))
