"""What every registered network promises, and what single ones do."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfactor import models
from fedfactor.models.efficientnet import SameConv

# Options that make a network small enough to run in a moment, without changing what it is made of.
SMALL: dict[str, dict[str, Any]] = {
    "lstm_shakespeare": {"hidden": 16},
    "lstm_imdb": {"hidden": 16},
    "rnn_shakespeare": {"width": 0.125},
    "transformer": {"dim": 16, "hidden": 32},
    "efficientnet_lite0": {"size": 32},
}
SHAPE = {"lstm_shakespeare": (7,), "lstm_imdb": (7,), "rnn_shakespeare": (7,), "transformer": (7,)}
CLASSES = {"cnn_femnist": 62, "lstm_imdb": 1, "lstm_shakespeare": 80, "rnn_shakespeare": 80, "transformer": 4}

every_model = pytest.mark.parametrize("name", models.list_models())


def make(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    small = SMALL.get(name, {"width": 0.125} if name.startswith("resnet") else {})
    return models.build(name, **{**small, **options})


def example(name: str, batch: int = 2) -> Tensor:
    return models.example_input(name, batch, shape=SHAPE.get(name), generator=torch.Generator().manual_seed(2))


def test_the_registry_holds_the_papers_networks() -> None:
    expected = "cnn4 cnn_femnist lstm_imdb lstm_shakespeare mlp resnet10 resnet18 resnet34 resnet8"
    assert set(models.list_models()) >= {*expected.split(), "rnn_shakespeare", "transformer", "vgg16"}


@every_model
def test_maps_its_example_to_logits_that_can_be_trained(name: str) -> None:
    model = make(name)
    logits = model(example(name))
    assert logits.shape == (2, CLASSES.get(name, 10))
    assert torch.isfinite(logits).all()
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@every_model
def test_registered_example_fits_the_default_network(name: str) -> None:
    # On the meta device: the full size costs nothing there.
    with torch.device("meta"):
        model = models.build(name)
    shape = (20,) if models.info(name).tokens else None  # time steps are slow there
    logits = model(models.example_input(name, 3, shape=shape).to("meta"))
    assert logits.shape == (3, CLASSES.get(name, 10))


# torch.export says this of torch's own LSTM, whose list of weights it mistakes for a change of state.
@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@every_model
def test_survives_copying_pickling_and_exporting(name: str) -> None:
    model, x = make(name).eval(), example(name)
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), expected)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), expected)


def test_efficientnet_pads_as_tensorflow_does() -> None:
    assert sum(p.numel() for p in models.build("efficientnet_lite0", classes=1000).parameters()) == 4_652_008
    layer = SameConv(1, 1, 3, 2, bias=False)
    torch.nn.init.ones_(layer.weight)
    # Of an even side one column is added at the end, of an odd side one at either end.
    assert layer(torch.ones(1, 1, 4, 4))[0, 0].tolist() == [[9, 6], [6, 4]]
    assert layer(torch.ones(1, 1, 3, 3))[0, 0].tolist() == [[4, 4], [4, 4]]


@every_model
def test_the_seed_decides_the_weights(name: str) -> None:
    for a, b in zip(make(name).parameters(), make(name).parameters(), strict=True):
        assert torch.equal(a, b)


def test_width_out_of_range_names_the_range() -> None:
    for name in ("cnn4", "cnn_femnist", "mlp", "resnet8", "rnn_shakespeare", "lstm_imdb", "transformer"):
        for width in (0.0, -1.0, 1.5, float("nan")):
            with pytest.raises(ValueError, match=r"width must lie in \(0, 1\]"):
                models.build(name, width=width)


def test_widths_round_up_but_not_because_of_binary_fractions() -> None:
    assert models.scaled(64, 0.35) == 23
    assert models.scaled(100, 0.07) == 7  # 0.07 * 100 > 7 in floating point
    assert models.scaled(3, 0.01) == 1
    assert models.scaled(512, 1.0) == 512
    assert models.scaled(64, 0.35, "nearest") == 22
    assert models.scaled(3, 0.01, "nearest") == 1
    with pytest.raises(ValueError, match="rounding must be 'up' or 'nearest'"):
        models.scaled(3, 0.5, "down")  # type: ignore[arg-type]


def test_batch_norm_without_statistics_has_none_and_uses_the_batch_in_evaluation() -> None:
    model = make("resnet8", norm="batch_no_stats").eval()
    assert not list(model.buffers())
    x = example("resnet8", 4)
    assert not torch.allclose(model(x)[:2], model(x[:2]))
    tracked = make("resnet8").eval()
    torch.testing.assert_close(tracked(x)[:2], tracked(x[:2]))


def test_group_norm_in_resnet_needs_a_divisor() -> None:
    assert isinstance(make("resnet8", norm="group", width=0.5).get_submodule("layer1.0.bn1"), nn.GroupNorm)
    with pytest.raises(ValueError, match=r"23 channels cannot be split into groups=2"):
        make("resnet8", norm="group", width=0.35)


def test_slice_keeps_the_first_channels_where_a_block_only_narrows() -> None:
    model = make("resnet18", width=0.25, scale_stem=False, shortcut="slice").eval()
    assert not any(".1.downsample" in n or n.startswith("layer1.0.downsample") for n in model.state_dict())
    assert model.get_submodule("layer1.0.conv1").weight.shape == (16, 64, 3, 3)
    block = model.get_submodule("layer1.0")
    # With a zero residual branch the block is ReLU of its shortcut.
    nn.init.zeros_(model.get_submodule("layer1.0.bn2").weight)  # type: ignore[arg-type]
    x = torch.randn(1, 64, 4, 4)
    assert torch.equal(block(x), x[:, :16].relu())
    # Later stages stride and grow: they project as always.
    assert model.get_submodule("layer2.0.downsample.0").weight.shape == (32, 16, 1, 1)


def test_imagenet_stem_quarters_the_image() -> None:
    model = make("resnet8", stem="imagenet")
    shapes: list[torch.Size] = []
    model.get_submodule("layer1").register_forward_hook(lambda m, i, o: shapes.append(i[0].shape))
    model(torch.randn(1, 3, 32, 32))
    assert shapes == [(1, 8, 8, 8)]


@pytest.mark.parametrize("option", [{"stem": "x"}, {"norm": "x"}, {"shortcut": "x"}])
def test_resnet_names_the_legal_values(option: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be one of 'cifar|'batch|'projection"):
        make("resnet8", **option)


def test_vgg_takes_larger_images() -> None:
    with torch.device("meta"):
        assert models.vgg16()(torch.empty(1, 3, 64, 64)).shape == (1, 10)


def test_padding_does_not_change_what_the_transformer_says() -> None:
    model = make("transformer").eval()
    ids = torch.tensor([[5, 9, 3]])
    padded = torch.tensor([[5, 9, 3, 0, 0]])
    torch.testing.assert_close(model(padded), model(ids))
    empty = model(torch.zeros(1, 4, dtype=torch.int64))
    assert torch.isfinite(empty).all()


def test_transformer_layers_start_different() -> None:
    model = make("transformer")
    first = model.get_parameter("encoder.layers.0.linear1.weight")
    second = model.get_parameter("encoder.layers.1.linear1.weight")
    assert not torch.equal(first, second)


def test_transformer_width_keeps_the_heads() -> None:
    model = models.transformer(width=0.3)
    attention = model.get_submodule("encoder.layers.0.self_attn")
    assert isinstance(attention, nn.MultiheadAttention)
    assert (attention.num_heads, attention.head_dim) == (4, 10)  # ceil(.3 * 32)


def test_transformer_refuses_texts_that_are_too_long() -> None:
    with pytest.raises(ValueError, match=r"9 tokens are longer than this network's length=8"):
        make("transformer", length=8)(torch.ones(1, 9, dtype=torch.int64))


def test_sinusoids() -> None:
    model = make("transformer", positions="sinusoidal", dim=8)
    table = model.get_buffer("positions")
    assert table.shape == (128, 8)
    assert torch.equal(table[0], torch.tensor([0.0, 1.0] * 4))
    torch.testing.assert_close(
        table[3, :2],
        torch.tensor([3.0, 3.0]).sin().where(torch.tensor([True, False]), torch.tensor(3.0).cos()),
    )
    assert "positions" not in model.state_dict()
