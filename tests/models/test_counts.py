"""Sizes of the networks, digit for digit: from the papers' tables or by hand from their layouts."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedfactor import models


def parameters(make: Callable[[], nn.Module]) -> int:
    # Only shapes matter here, and the meta device has no weights to draw.
    with torch.device("meta"):
        return sum(p.numel() for p in make().parameters())


@pytest.mark.parametrize(("classes", "expected"), [(10, 15_253_578), (100, 15_299_748)])
def test_vgg16_is_table_5_of_fedpara(classes: int, expected: int) -> None:
    assert parameters(lambda: models.vgg16(classes)) == expected


def test_a_quarter_of_vgg16_by_hand() -> None:
    """Weights and biases of the convolutions, two numbers per normalised channel, three linear layers."""
    convolutions = 448 + 2_320 + 4_640 + 9_248 + 18_496 + 2 * 36_928 + 73_856 + 5 * 147_584
    assert parameters(lambda: models.vgg16(planes=16)) == convolutions + 2_112 + 2 * 16_512 + 1_290


@pytest.mark.parametrize(
    ("width", "expected"), [(0.25, 701_466), (0.5, 2_797_610), (0.75, 6_288_442), (1.0, 11_173_962)]
)
def test_resnet18_of_scaled_width_is_table_1_of_flanc(width: float, expected: int) -> None:
    assert parameters(lambda: models.resnet18(width=width)) == expected


@pytest.mark.parametrize(("width", "millions"), [(0.25, "0.7"), (0.5, "2.8"), (0.75, "6.3")])
def test_a_fixed_stem_adds_a_projection_and_rounds_to_the_same_table(width: float, millions: str) -> None:
    model = models.resnet18(width=width, scale_stem=False)
    assert model.conv1.weight.shape == (64, 3, 3, 3)
    block = model.get_submodule("layer1.0")
    assert isinstance(block, models.BasicBlock)
    assert block.downsample is not None
    assert f"{parameters(lambda: model) / 1e6:.1f}" == millions


def test_a_fixed_stem_changes_nothing_at_full_width() -> None:
    assert parameters(lambda: models.resnet18(scale_stem=False)) == 11_173_962


@pytest.mark.parametrize(
    ("make", "width", "millions"),
    [
        (models.resnet18, 0.64, "4.59"),
        (models.resnet18, 0.5, "2.80"),
        (models.resnet18, 0.35, "1.37"),
        (models.resnet34, 0.64, "8.77"),
        (models.resnet34, 0.5, "5.35"),
        (models.resnet34, 0.4, "3.42"),
    ],
)
def test_slim_widths_of_fedhm(make: Callable[..., nn.Module], width: float, millions: str) -> None:
    classes = 10 if make is models.resnet18 else 100
    assert f"{parameters(lambda: make(classes=classes, width=width, rounding='nearest')) / 1e6:.2f}" == millions


def test_resnet34_of_fedhm() -> None:
    assert parameters(lambda: models.resnet34(classes=100)) == 21_328_292


def test_full_rank_parts_of_feddecomp() -> None:
    assert parameters(lambda: models.resnet8(stem="imagenet")) == 1_235_274
    assert parameters(lambda: models.resnet10(classes=100, stem="imagenet")) == 4_957_092


@pytest.mark.parametrize(("width", "expected"), [(0.25, 43_978), (0.5, 105_738), (0.75, 185_930), (1.0, 284_554)])
def test_cnn4_is_table_1_of_flanc(width: float, expected: int) -> None:
    assert parameters(lambda: models.cnn4(width=width)) == expected


def test_femnist_cnn_in_both_variants() -> None:
    fc = 64 * 7 * 7 * 62 + 62
    assert parameters(models.cnn_femnist) == (64 * 25 + 64) + (64 * 64 * 9 + 64) + fc
    code = (32 * 25 + 32) + (64 * 32 * 25 + 64) + fc
    assert parameters(lambda: models.cnn_femnist(variant="code")) == code


def test_mlp_of_pfedpara() -> None:
    assert parameters(lambda: models.mlp(classes=62)) == 216_894
    assert parameters(lambda: models.mlp(width=0.5)) == 784 * 128 + 128 + 128 * 10 + 10


def test_lstms() -> None:
    layer1 = 4 * 256 * (8 + 256) + 2 * 1024
    layer2 = 4 * 256 * (256 + 256) + 2 * 1024
    shakespeare = 80 * 8 + layer1 + layer2 + 256 * 80 + 80
    assert parameters(lambda: models.lstm_shakespeare(weight_norm=False)) == shakespeare
    lengths = 4 * 1024  # of the rows of four weights
    assert parameters(models.lstm_shakespeare) == shakespeare + lengths
    imdb = 1001 * 64 + (4 * 256 * (64 + 256) + 2 * 1024) + layer2 + 256 + 1
    assert parameters(models.lstm_imdb) == imdb


@pytest.mark.parametrize("width", [0.25, 0.5, 0.75, 1.0])
def test_flanc_counts_weights_and_one_bias_of_the_recurrent_layer(width: float) -> None:
    lstm = models.rnn_shakespeare(width=width).lstm
    counted = sum(p.numel() for name, p in lstm.named_parameters() if "bias_hh" not in name)
    assert counted == 786_432 * width**2 + 1_024 * width


def test_transformer() -> None:
    attention = 4 * (128 * 128 + 128)
    feedforward = 2 * 128 * 256 + 256 + 128
    layer = attention + feedforward + 2 * 2 * 128
    whole = 10_000 * 128 + 128 * 128 + 2 * layer + 128 * 4 + 4
    assert parameters(models.transformer) == whole
    assert parameters(lambda: models.transformer(positions="sinusoidal")) == whole - 128 * 128


def test_layer_names_suit_patterns() -> None:
    vgg = {name for name, _ in models.vgg16().named_parameters()}
    assert {name.split(".")[0] for name in vgg} == {"features", "classifier"}
    resnet = {name for name, _ in models.resnet18().named_parameters()}
    assert {"conv1.weight", "bn1.weight", "layer1.0.conv1.weight", "layer1.0.bn1.weight", "fc.bias"} <= resnet
    assert {"layer2.0.downsample.0.weight", "layer2.0.downsample.1.weight"} <= resnet
