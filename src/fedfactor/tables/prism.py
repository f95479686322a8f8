"""PriSM (arXiv:2208.13141), Tables 1 and 10: costs of sub-models of ResNet-18.

The printed figures count only the sixteen 3 x 3 convolutions of the blocks. The rank r = keep N is not rounded, and is
also the number of output channels: V has 9 C r parameters (C inputs: 64 for the first layer, keep M for the others), U
has r r. "MACs" are two operations per multiply-accumulate, for a batch of 32. Memory counts the elements output by V, U
and the normalisation, or by the convolution and the normalisation in the full model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from torch import nn

from fedfactor.cost import measure
from fedfactor.factor.base import WeightShape
from fedfactor.factor.spectral import ChannelSplit
from fedfactor.nn import factorize
from fedfactor.tables.counting import images, network
from fedfactor.tables.printed import PRINTED
from fedfactor.tables.row import Row

BATCH, SIDE = 32, 32
KEEPS = (1.0, 0.8, 0.6, 0.4, 0.2)
QUANTITIES = ("Params", "MACs", "Mem")

FEDHM_NOTES = {
    "Params": "r (9 M + N) with r = keep N and all N outputs: not FedHM's own split, but what fits",
    "MACs": "rule unknown; ours counts the parameters once per output position",
    "Mem": "rule unknown; ours is V's output of r channels, U's and the normalisation's of N",
    "Params / full": "percentages of the printed figures, which are cut already: 4.9 / 11 is 44.5 %",
    "MACs / full": "rule unknown, as for the MACs",
    "Mem / full": "rule unknown, as for the memory",
}


@dataclass(frozen=True)
class Layer:
    """A counted convolution: its weight, and the positions of its output for one image."""

    shape: WeightShape
    positions: int


@dataclass(frozen=True)
class Footprint:
    """The quantities of the tables for one model; real-valued, because r is."""

    params: float
    macs: float
    mem: float

    def get(self, quantity: str) -> float:
        """Return a quantity by its name in the tables."""
        return {"Params": self.params, "MACs": self.macs, "Mem": self.mem}[quantity]


def rows() -> list[Row]:
    """Recompute both tables, the extra memory of PriSM-O2 and the abstract's share."""
    small = _sub_model(0.2)
    extra = 100 * (_sub_model(0.2, outputs=2).mem / small.mem - 1)
    share = 100 * small.params / _full().params
    note = "V's output of r channels, U's and the normalisation's of 2 r: 5 r instead of 3 r"
    return [
        *_table("Table 1", "", PRINTED["prism"]["prism"], _sub_model, _integer_note),
        *_table("Table 10", "PriSM ", PRINTED["prism"]["prism"], _sub_model, _integer_note),
        *_table(
            "Table 10", "FedHM ", PRINTED["prism"]["fedhm"], _all_outputs, lambda keep, quantity: FEDHM_NOTES[quantity]
        ),
        Row("prism", "Section 4.1", "PriSM-O2, 0.2", "additional Mem", extra, "65 %", note),
        Row("prism", "Abstract", "0.2", "Params / full", share, "5 %"),
    ]


def _table(
    table: str,
    prefix: str,
    printed: Mapping[str, Sequence[str]],
    count: Callable[[float], Footprint],
    note: Callable[[float, str], str],
) -> Iterator[Row]:
    """Compare figures and percentages of the three quantities at every keep ratio."""
    for quantity in QUANTITIES:
        full = _full().get(quantity)
        for keep, text in zip(KEEPS, printed[quantity], strict=True):
            ours = full if keep == 1 else count(keep).get(quantity)
            label, share = f"{prefix}{'full' if keep == 1 else keep}", f"{quantity} / full"
            figure, _, percent = text.partition(", ")
            remark = "" if keep == 1 else note(keep, quantity)
            yield Row("prism", table, label, quantity, ours, figure, remark)
            if percent:
                yield Row("prism", table, label, share, 100 * ours / full, percent, note(keep, share))


@cache
def _layers() -> tuple[Layer, ...]:
    """Read the 3 x 3 convolutions of the blocks off the network, in order."""
    model = network("resnet18")
    outputs = {layer.name: layer.outputs for layer in measure(model, images(1, SIDE)).layers}
    found = []
    for name, module in model.named_modules():
        if name.startswith("layer") and isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
            shape = WeightShape.of(module.weight)
            found.append(Layer(shape, outputs[name] // shape.out))
    return tuple(found)


def _total(params: list[float], channels: list[float]) -> Footprint:
    """Sum over layers, given the parameters of each and the channels of all maps that it outputs."""
    positions = [layer.positions for layer in _layers()]
    macs = sum(2 * size * place * BATCH for size, place in zip(params, positions, strict=True))
    mem = sum(maps * place * BATCH for maps, place in zip(channels, positions, strict=True))
    return Footprint(sum(params), macs, mem)


@cache
def _full() -> Footprint:
    shapes = [layer.shape for layer in _layers()]
    return _total([shape.numel for shape in shapes], [2 * shape.out for shape in shapes])


@cache
def _sub_model(keep: float, outputs: int = 1) -> Footprint:
    """Count PriSM's sub-model with `outputs` times r output channels.

    Only the first layer reads all its inputs: the stem has no fewer channels.
    """
    shapes = [layer.shape for layer in _layers()]
    inputs = [shape.inp * (1 if i == 0 else keep * outputs) for i, shape in enumerate(shapes)]
    ranks = [keep * shape.out for shape in shapes]
    params = [r * c * s.area + outputs * r * r for r, c, s in zip(ranks, inputs, shapes, strict=True)]
    return _total(params, [(1 + 2 * outputs) * r for r in ranks])


@cache
def _all_outputs(keep: float) -> Footprint:
    """Count the sub-model in which each layer keeps all its inputs and outputs, and only its rank is r.

    It is PriSM's with `outputs = "all"`, which the authors' code trains, and the rows that PriSM calls FedHM.
    """
    shapes = [layer.shape for layer in _layers()]
    params = [keep * s.out * (s.fan_in + s.out) for s in shapes]
    return _total(params, [(keep + 2) * s.out for s in shapes])


@cache
def _integer(keep: float) -> Footprint:
    """Build the sub-model a client really trains, with ceil(keep N) channels and ranks, and measure it."""
    slim = network("resnet18", width=keep, scale_stem=False, shortcut="slice")
    stay = ["conv1", "fc", "*.downsample.0"]
    model = factorize(slim, ChannelSplit(ratio=1.0), skip=stay)
    cost = measure(model, images(BATCH, SIDE))
    convs = [layer for layer in cost.layers if layer.kind == "FactorConv2d"]
    norms = [layer for layer in cost.layers if layer.name.startswith("layer") and ".bn" in layer.name]
    # Rank and outputs are equal here, so V and U output maps of the same size.
    mem = sum(2 * layer.outputs for layer in convs) + sum(layer.outputs for layer in norms)
    return Footprint(sum(c.parameters for c in convs), 2 * sum(c.macs for c in convs), mem)


def _integer_note(keep: float, quantity: str) -> str:
    if quantity not in QUANTITIES:
        return ""
    real = _integer(keep).get(quantity)
    return f"as built, with whole ranks: {real:,.0f}; with all outputs: {_all_outputs(keep).get(quantity):,.0f}"
