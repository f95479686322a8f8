"""FedPara (arXiv:2108.06098): sizes of its networks, and the times that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from fedfactor.cost import link_seconds, wire_bytes
from fedfactor.factor.base import Scheme, WeightShape
from fedfactor.factor.dense import Dense
from fedfactor.factor.hadamard import Hadamard
from fedfactor.factor.spectral import ChannelSplit
from fedfactor.factor.tucker import LowRank
from fedfactor.nn import factor_weights, factorize, first_layers
from fedfactor.tables.counting import network, parameters
from fedfactor.tables.printed import PRINTED
from fedfactor.tables.row import Row

GAMMAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)

# Table 1, last column: parameters and rank of an example layer, R = 16.
FC, CONV, R = WeightShape(256, 256), WeightShape(256, 256, (3, 3)), 16
TABLE_1: dict[str, tuple[WeightShape, Scheme, str, str]] = {
    "FC, original": (FC, Dense(), "66 K", "256"),
    "FC, low-rank": (FC, LowRank(rank=2 * R), "16 K", "32"),
    "FC, FedPara": (FC, Hadamard(rank=R), "16 K", "256"),
    "Conv., original": (CONV, Dense(), "590 K", "256"),
    "Conv., low-rank": (CONV, LowRank(rank=2 * R, blocks=2), "21 K", "32"),
    "Conv., FedPara (Prop. 1)": (CONV, Hadamard(rank=R, reshape=True), "82 K", "256"),
    "Conv., FedPara (Prop. 3)": (CONV, Hadamard(rank=R), "21 K", "256"),
}

# Seconds of computing in a round, and rounds to the target accuracy: the paper's measurements.
T_COMP = {"original": 1.64, "FedPara": 2.34}
ROUNDS = {"original": 112, "FedPara": 115}

SHARE = "parameters / original"
RULE = "min r_min, whole r_max, r rounded, first layer dense: fits more cells than any other single rule"
LOW_VGG = "rule unknown; ours is a Tucker form with 0.173 of the channels on both sides, a fitted ratio"
LOW_LSTM_SCHEME = LowRank(ratio=0.1)
LOW_LSTM = "rule unknown; ours is a rank of a tenth of the smaller side"


def rows() -> list[Row]:
    """Recompute Tables 1, 5, 7, 8, 10, 11 and 12 and the figures of the text."""
    return [
        *_table_1(),
        *_section_2_2_and_a_2(),
        *_section_3_2(),
        *_table_5(),
        *_table_7(),
        *_table_8(),
        *_table_10(),
        *_table_11(),
        *_table_12(),
    ]


@cache
def vgg16(classes: int, gamma: float | None) -> nn.Module:
    """Build VGG16; with a gamma, all convolutions except the first are Hadamard products (C.2)."""
    model = network("vgg16", classes=classes)
    if gamma is None:
        return model
    return factorize(model, Hadamard(gamma=gamma), skip=["features.0", "classifier"])


def _by_number(table: str) -> Iterator[tuple[int, Any]]:
    """Yield the lines of a printed table with their number of classes or speed."""
    return ((int(number), line) for number, line in PRINTED["fedpara"][table].items())


def _share(model: nn.Module, original: nn.Module) -> float:
    return parameters(model) / parameters(original)


def _table_1() -> Iterator[Row]:
    """Count the factors, and draw a weight to see its rank."""
    cell = partial(Row, "fedpara", "Table 1")
    for label, (shape, scheme, size, rank) in TABLE_1.items():
        yield cell(label, "parameters", scheme.parameters(shape), size)
        yield cell(label, "rank of a drawn weight", _rank(scheme, shape), rank)


def _rank(scheme: Scheme, shape: WeightShape) -> int:
    factors = scheme.init(shape, torch.Generator().manual_seed(0))
    weight = scheme.compose({name: factor.double() for name, factor in factors.items()}, shape)
    return int(torch.linalg.matrix_rank(weight.flatten(1)))


def _section_2_2_and_a_2() -> Iterator[Row]:
    """Compare both propositions on Table 1's convolution, and a full-rank product with a 100 x 100 matrix."""
    gain = Hadamard(rank=R, reshape=True).parameters(CONV) / Hadamard(rank=R).parameters(CONV)
    note = "Table 1's own 82 K / 21 K is 3.9"
    yield Row("fedpara", "Section 2.2", "Conv., Prop. 1 / Prop. 3", "parameters", gain, "3.8 x", note)
    square = WeightShape(100, 100)
    gain = square.numel / Hadamard(rank=10).parameters(square)
    yield Row("fedpara", "Section A.2", "100 x 100 / FedPara, R = 10", "parameters", gain, "2.5 x")


def _section_3_2() -> Iterator[Row]:
    """Compare the shares of the original networks, and the bytes that personalised methods save."""
    cell = partial(Row, "fedpara", "Section 3.2")
    low = factorize(network("vgg16", classes=10), LowRank(ratio=0.173), skip=["classifier"])
    yield cell("VGG16 low", SHARE, 100 * _share(low, vgg16(10, None)), "10.25 %", LOW_VGG)
    for label, classes, gamma, text in (
        ("Table 2", 10, 0.1, "10.15 %"),
        ("CIFAR-10", 10, 0.1, "10.1 %"),
        ("CIFAR-100", 100, 0.4, "29.4 %"),
        ("CINIC-10", 10, 0.3, "21.8 %"),
    ):
        ours = 100 * _share(vgg16(classes, gamma), vgg16(classes, None))
        yield cell(f"VGG16 FedPara, {label}, gamma {gamma}", SHARE, ours, text, RULE)
    yield cell("LSTM low", SHARE, 100 * _share(lstm(LOW_LSTM_SCHEME), lstm(None)), "16 %", LOW_LSTM)
    yield cell("LSTM FedPara", SHARE, 100 * _share(lstm(Hadamard(gamma=0.0)), lstm(None)), "19 %")
    original = network("mlp", classes=62)
    sent = parameters(original.get_submodule("fc1"))
    yield cell("original / pFedPara", "parameters sent", parameters(original) / _pfedpara(original), "3.4 x")
    yield cell("original / FedPer", "parameters sent", parameters(original) / sent, "1.07 x")


def _pfedpara(original: nn.Module) -> int:
    """Count what pFedPara sends at gamma 0.5: the first pair of every layer's factors, and the biases."""
    model = factorize(original, Hadamard(gamma=0.5, personal=True))
    weights = factor_weights(model).values()
    return parameters(model) - sum(weight.factors[name].numel() for weight in weights for name in ("x2", "y2"))


@cache
def lstm(scheme: Scheme | None) -> nn.Module:
    """Build the LSTM; with a scheme, its fused gate matrices are factors. Embedding and decoder stay dense."""
    model = network("lstm_shakespeare")
    return model if scheme is None else factorize(model, scheme, skip=["fc"])


def _table_5() -> Iterator[Row]:
    cell = partial(Row, "fedpara", "Table 5")
    for classes, (original, *printed) in _by_number("table_5"):
        yield cell(f"original, {classes} classes", "parameters", parameters(vgg16(classes, None)), original)
        for gamma, text in zip(GAMMAS, printed, strict=True):
            ours = parameters(vgg16(classes, gamma))
            yield cell(f"gamma {gamma}, {classes} classes", "parameters", ours, text, RULE)


def _seconds(model: str, speed: int) -> tuple[float, float]:
    """Return t_comm and t = t_comp + t_comm of a round at a speed in Mbps."""
    built = vgg16(10, None if model == "original" else 0.1)
    link = link_seconds(wire_bytes(built.parameters()), speed)
    return link, T_COMP[model] + link


def _table_7() -> Iterator[Row]:
    cell = partial(Row, "fedpara", "Table 7")
    note = "t_comp is the paper's measurement, taken as given"
    for speed, (original, fedpara, ratio) in _by_number("table_7"):
        for model, (link, total) in {"original": original, "FedPara": fedpara}.items():
            t_comm, t = _seconds(model, speed)
            yield cell(f"{speed} Mbps, {model}", "t_comm", t_comm, link, "2 x size / speed, in MiB")
            yield cell(f"{speed} Mbps, {model}", "t", t, total, note)
        gain = _seconds("original", speed)[1] / _seconds("FedPara", speed)[1]
        yield cell(f"{speed} Mbps, FedPara", "ratio of t", gain, ratio, note)


def _table_8() -> list[Row]:
    note = "t_comp and the rounds, 112 and 115, are the paper's measurements, taken as given"
    cell = partial(Row, "fedpara", "Table 8", note=note)
    found = []
    for speed, (original, fedpara, ratio) in _by_number("table_8"):
        minutes = {model: _seconds(model, speed)[1] * ROUNDS[model] / 60 for model in ROUNDS}
        gain = minutes["original"] / minutes["FedPara"]
        found += [
            cell(f"{speed} Mbps, original", "training time", minutes["original"], original),
            cell(f"{speed} Mbps, FedPara", "training time", minutes["FedPara"], fedpara),
            cell(f"{speed} Mbps, FedPara", "ratio of training time", gain, ratio),
        ]
    largest = max((row for row in found if row.quantity.startswith("ratio")), key=lambda row: row.ours)
    return [*found, replace(largest, table="Section D.1", printed="9.68 x")]


def _table_10() -> Iterator[Row]:
    """Compare Pufferfish's hybrid networks with FedPara's."""
    cell, original = partial(Row, "fedpara", "Table 10"), vgg16(10, None)
    for full, text in ((5, "0.33"), (8, "0.44")):
        skip = [*first_layers(original, full), "classifier"]
        hybrid = factorize(original, ChannelSplit(ratio=0.25, rounding="floor"), skip=skip)
        note = f"inferred: a quarter of the rank; the first {full} convolutions and the classifier full"
        yield cell(f"Pufferfish, {full} full", SHARE, _share(hybrid, original), text, note)
    for gamma, text in ((0.2, "0.15"), (0.4, "0.29")):
        yield cell(f"FedPara, gamma {gamma}", SHARE, _share(vgg16(10, gamma), original), text, RULE)


def _table_11() -> Iterator[Row]:
    cell, original = partial(Row, "fedpara", "Table 11"), lstm(None)
    yield cell("LSTM original", SHARE, _share(original, original), "1.0")
    yield cell("LSTM low", SHARE, _share(lstm(LOW_LSTM_SCHEME), original), "0.16", LOW_LSTM)
    yield cell("LSTM FedPara, gamma 0.0", SHARE, _share(lstm(Hadamard(gamma=0.0)), original), "0.19")


def _table_12() -> Iterator[Row]:
    """Count bytes down and up; FedPAQ sends float16 up. Section D.3 compares them."""
    down, short = (
        [wire_bytes(vgg16(10, gamma).parameters(), dtype) for gamma in (None, 0.5)]
        for dtype in (torch.float32, torch.float16)
    )
    fedavg, fedpara = (2 * size for size in down)
    fedpaq, both = (size + half for size, half in zip(down, short, strict=True))
    cell = partial(Row, "fedpara", "Table 12")
    yield cell("FedAvg", "bytes per round", fedavg, "122 MB")
    yield cell("FedPAQ", "bytes per round", fedpaq, "91.4 MB")
    yield cell("FedPara, gamma 0.5", "bytes per round", fedpara, "46.4 MB", RULE)
    yield cell("FedPara, gamma 0.5, + FedPAQ", "bytes per round", both, "34.74 MB", RULE)
    cell = partial(Row, "fedpara", "Section D.3")
    note = "the printed 91.4 / 46.4 is 1.97; one size is printed too small, the other too large"
    yield cell("FedPAQ / FedPara", "bytes per round", fedpaq / fedpara, "1.96 x", note)
    yield cell("FedPara, FedPAQ saves", "bytes per round", 100 * (1 - both / fedpara), "25 %")
