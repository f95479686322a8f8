"""Costs, against counts made by hand and against the papers' tables."""

import copy
import io
from typing import Any

import pytest
import rich.console
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fedfactor import cost, meta, models


def rows(model: nn.Module, example: Any) -> dict[str, cost.LayerCost]:
    return {row.name: row for row in cost.measure(model, example).layers}


def test_linear_and_convolution_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1), nn.Flatten(), nn.Linear(8 * 4 * 4, 5))
    found = rows(model, torch.randn(2, 3, 8, 8))
    assert found["0"] == cost.LayerCost("0", "Conv2d", 8 * 27 + 8, 2 * 16 * 8 * 27, 2 * 8 * 16)
    assert found["2"] == cost.LayerCost("2", "Linear", 128 * 5 + 5, 2 * 128 * 5, 2 * 5)
    assert cost.measure(model, torch.randn(2, 3, 8, 8)).macs == 2 * (16 * 8 * 27 + 128 * 5)


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Conv2d(8, 8, 3, padding=1, groups=4), (1, 8, 5, 5), 8 * 25 * 2 * 9),
        (nn.Conv2d(4, 6, (1, 3), stride=(1, 2), padding=(0, 1)), (1, 4, 6, 6), 6 * 6 * 3 * 4 * 3),
        (nn.Conv1d(4, 6, 5), (3, 4, 10), 3 * 6 * 6 * 4 * 5),
        (nn.ConvTranspose2d(4, 6, 2, stride=2), (1, 4, 5, 5), 4 * 25 * 6 * 4),
        (nn.Linear(7, 3), (2, 11, 7), 2 * 11 * 7 * 3),
        (nn.Linear(7, 3, bias=False), (7,), 7 * 3),
    ],
)
def test_single_layers_by_hand(layer: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    assert cost.measure(layer, torch.randn(shape)).macs == expected


@pytest.mark.parametrize(("cell", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers_by_hand(cell: Any, gates: int, bias: bool) -> None:
    batch, time, inputs, hidden = 3, 5, 7, 11
    layer = cell(inputs, hidden, 2, batch_first=True, bias=bias)
    first, second = gates * hidden * (inputs + hidden), gates * hidden * (hidden + hidden)
    found = cost.measure(layer, torch.randn(batch, time, inputs))
    assert found.macs == batch * time * (first + second)
    assert found.layers[0].outputs == batch * time * hidden


@pytest.mark.parametrize(
    "layer", [nn.LSTM(7, 11, 2), nn.GRU(7, 11, 2), nn.TransformerEncoderLayer(8, 2), nn.Linear(6, 3)]
)
def test_a_model_that_looks_at_its_numbers_costs_what_it_would_without(layer: nn.Module) -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.drop = layer, nn.Dropout()

        def forward(self, x: Tensor) -> Any:
            return self.inside(self.drop(x) / (2 if x.max() > 100 else 1))

    width = 8 if isinstance(layer, nn.TransformerEncoderLayer) else 6 if isinstance(layer, nn.Linear) else 7
    example, model = torch.randn(3, 5, width), Looking()
    before, state = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    assert cost.measure(model, example).macs == cost.measure(layer, example).macs > 0
    assert torch.equal(torch.get_rng_state(), before), "counting must not draw random numbers"
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


def test_packed_sequences_are_counted() -> None:
    class Packed(nn.LSTM):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            lengths = (x[..., 0] > 0).sum(1).clamp(min=1)
            return super().forward(nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False))

    x = torch.zeros(2, 5, 7)
    x[0, :3] = x[1, :1] = 1
    assert cost.measure(Packed(7, 11, batch_first=True), x).macs == (3 + 1) * 4 * 11 * (7 + 11)


def test_what_cannot_be_counted_and_what_cannot_run_are_told_apart() -> None:
    for layer, shape in ((nn.Linear(4, 2), (1, 3)), (nn.BatchNorm2d(4), (1, 3, 2, 2))):
        with pytest.raises(RuntimeError, match=r"mat1 and mat2|running_mean"):
            cost.measure(layer, torch.zeros(shape))

    class Uncounted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if _get_current_dispatch_mode() is not None:
                raise RuntimeError("no modes here")
            return super().forward(x)

    model = Uncounted(4, 3).train()
    with pytest.raises(cost.Uncountable, match="operations cannot be counted: no modes here"):
        cost.measure(model, torch.zeros(2, 4))
    assert model.training
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        cost.measure(model, torch.zeros(2, 5))
    assert not isinstance(caught.value, cost.Uncountable)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_attention_by_hand(training: bool, frozen: bool) -> None:
    batch, time, dim, hidden = 2, 5, 16, 24
    layer = nn.TransformerEncoderLayer(dim, 4, hidden, batch_first=True).train(training)
    layer.requires_grad_(not frozen)
    found = rows(layer, torch.randn(batch, time, dim))
    projections = 4 * time * dim * dim  # q, k, v and the output
    scores = 2 * time * time * dim  # q k^T and its product with v, over all heads
    assert found["self_attn"].macs == batch * (projections + scores)
    assert found["linear1"].macs == found["linear2"].macs == batch * time * dim * hidden
    assert sum(row.parameters for row in found.values()) == sum(p.numel() for p in layer.parameters())


def test_functional_products_go_to_the_module_that_makes_them() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 3))
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.inner(nn.functional.linear(x, self.w))
            return torch.einsum("bi,bij->bj", self.inner(x), y) + (self.w @ torch.ones(3, device=x.device)).sum()

    found = rows(Odd(), (torch.randn(2, 3), torch.randn(2, 4, 5)))
    assert found[""].macs == 2 * 3 * 4 + 2 * 4 * 5 + 4 * 3
    assert found["inner"].macs == 2 * (2 * 4 * 4)  # called twice
    assert found["inner"].outputs == 2 * (2 * 4)


def test_saved_activations_of_a_small_net_by_hand() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    found = cost.measure(model, torch.randn(2, 3, 4, 4))
    image, maps, pooled = 2 * 3 * 16, 2 * 4 * 16, 2 * 4 * 4
    # Conv: its input. Batch norm: its input, mean and 1/std. ReLU and pooling: ReLU's output, once.
    # Pooling: also the places of the maxima, 8 bytes each. Linear: the pooled map (Flatten is a view).
    floats = image + maps + 2 * 4 + maps + pooled
    assert found.activations == floats + pooled
    assert found.activation_bytes == 4 * floats + 8 * pooled
    assert (found.parameters, found.buffers) == (4 * 27 + 4 + 8 + 16 * 5 + 5, 4 + 4 + 1)


def test_saved_activations_are_those_of_a_real_run() -> None:
    torch.manual_seed(0)
    model = models.resnet8(width=0.125)
    x = torch.randn(2, 3, 16, 16)
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    assert cost.measure(model, x).activation_bytes == sum(storage.nbytes() for storage in kept.values())


def test_nothing_is_saved_where_nothing_is_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).requires_grad_(False)
    found = cost.measure(model, torch.randn(2, 4))
    assert (found.parameters, found.trainable, found.activations) == (67, 0, 0)
    model[2].requires_grad_(True)
    found = cost.measure(model, torch.randn(2, 4))
    assert (found.trainable, found.activations) == (27, 2 * 8)


def test_composed_weights_count_as_memory_and_products() -> None:
    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.u, self.v = nn.Parameter(torch.randn(10, 2)), nn.Parameter(torch.randn(2, 6))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.u @ self.v)

    x = torch.randn(3, 6)
    found = cost.measure(LowRank(), x)
    assert found.macs == 10 * 2 * 6 + 3 * 10 * 6
    # The composed weight is saved only if the input needs a gradient.
    assert found.activations == 3 * 6
    behind = cost.measure(nn.Sequential(nn.Linear(6, 6), LowRank()), x)
    assert behind.activations == 3 * 6 + 3 * 6 + 10 * 6


def test_own_rules_for_tensors_without_numbers_are_torchs() -> None:
    """The rules exist because torch's import its compiler."""
    aten = torch.ops.aten
    image, flat = torch.empty(4, 6, 5, 5, device="meta"), torch.empty(4, 6, device="meta")
    last = image.to(memory_format=torch.channels_last)
    grouped = (None, None, 4, 6, 25, 3, 1e-5)
    calls: dict[Any, list[tuple[Any, ...]]] = {
        aten.addmm: [(torch.empty(3, device="meta"), flat, torch.empty(6, 3, device="meta"))],
        aten.mm: [(flat, flat.t())],
        aten.convolution: [
            (image, torch.empty(9, 2, 3, 2, device="meta"), None, [2, 1], [1, 0], [1, 2], False, [0, 0], 3),
            (image, torch.empty(6, 5, 3, 3, device="meta"), None, [2, 1], [1, 1], [1, 1], True, [0, 0], 1),
        ],
        aten.max_pool2d_with_indices: [
            (image, [2, 3], [2, 2], [1, 0]),
            (image, [2, 2], [2, 2]),
            (image, [2], []),
            (image, [2, 2], [2, 2], [0, 0], [1, 1], True),
        ],
        aten.native_batch_norm: [(image, None, None, None, None, True, 0.1, 1e-5)],
        aten.native_group_norm: [(image, *grouped)],
        aten.mean: [(image, [2, -1], True), (image, [-1]), (flat,)],
        **{
            pointwise: [(last,)]
            for pointwise in (aten.relu, aten.hardtanh, aten.tanh, aten.sigmoid, aten.gelu, aten.silu)
        },
        **{
            pointwise: [(image, last), (last, image), (image, flat[0, :5]), (flat, 2), (flat.t(), flat.t())]
            for pointwise in (aten.add, aten.sub, aten.mul, aten.div)
        },
    }
    assert calls.keys() == meta.RULES.keys()
    left: list[Any] = []
    for operation, several in calls.items():
        for args in several:
            ours, theirs = meta.RULES[operation](*args), operation(*args)
            if ours is None:
                left.append(operation)
                continue
            for mine, other in zip(
                *((one if isinstance(one, tuple) else (one,)) for one in (ours, theirs)), strict=True
            ):
                assert (mine.shape, mine.dtype) == (other.shape, other.dtype) and mine.is_meta
                assert mine.stride() == other.stride()
    assert left == [aten.convolution, *(2 * [aten.max_pool2d_with_indices])]  # transposed, one size, rounded up
    wrong = torch.empty(9, 3, 3, 3, device="meta")  # for three channels
    assert meta._convolved(image, wrong, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1) is None  # torch says why
    integers = torch.empty(3, dtype=torch.int64, device="meta")
    for args in ((integers, 2), (flat, 1j), (flat, flat.double()), (flat.t(), flat[0, :4])):
        assert meta._pointwise(*args) is None  # left to torch


def test_tied_weights_are_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    found = cost.measure(model, torch.randn(1, 4))
    assert found.parameters == 16
    assert [row.parameters for row in found.layers] == [16, 0]
    assert found.macs == 32
    assert cost.wire_bytes(model) == 64


def test_measuring_leaves_the_model_alone() -> None:
    model = models.resnet8(width=0.125)
    before = copy.deepcopy(model.state_dict())
    with torch.inference_mode():
        cost.measure(model, torch.randn(2, 3, 8, 8))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model._forward_hooks
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert model.training


@pytest.mark.parametrize("name", models.list_models())
def test_rows_of_every_network_add_up(name: str) -> None:
    model = models.build(name).eval()
    shape = (5,) if models.info(name).tokens else None
    found = cost.measure(model, models.example_input(name, 1, shape=shape))
    assert sum(row.parameters for row in found.layers) == found.parameters
    assert found.macs > 0
    assert found.activations > 0


def low_rank(model: models.ResNet, full: tuple[str, ...], factor: int) -> models.ResNet:
    """FedHM's hybrid network (Tables 6 and 7), by hand: a (1, 3) and a (3, 1) convolution for a 3 x 3."""
    for name, conv in list(model.named_modules()):
        if not isinstance(conv, nn.Conv2d) or conv.kernel_size != (3, 3) or name.startswith(full):
            continue
        rank, stride = max(round(conv.out_channels / factor), 1), conv.stride[0]
        pair = nn.Sequential(
            nn.Conv2d(conv.in_channels, rank, (1, 3), (1, stride), (0, 1), bias=False),
            nn.Conv2d(rank, conv.out_channels, (3, 1), (stride, 1), (1, 0), bias=False),
        )
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, pair)
    return model


def millions(model: nn.Module, pixels: int) -> str:
    return f"{cost.ptflops_macs(model, torch.empty(2, 3, pixels, pixels)) / 2e6:.2f}"


@pytest.mark.parametrize(
    ("make", "classes", "pixels", "table"),
    [
        (models.resnet18, 10, 32, {1: "557.22", 0.64: "229.50", 0.5: "140.20", 0.35: "68.61"}),
        (models.resnet34, 100, 32, {1: "1162.47", 0.64: "478.19", 0.5: "291.83", 0.4: "187.53"}),
        (models.resnet34, 200, 64, {1: "4649.78", 0.64: "1912.71", 0.5: "1167.26", 0.4: "750.08"}),
    ],
)
def test_slim_columns_of_fedhm_table_8(make: Any, classes: int, pixels: int, table: dict[float, str]) -> None:
    with torch.device("meta"):
        networks = {width: make(classes=classes, width=width, rounding="nearest") for width in table}
    assert {width: millions(network, pixels) for width, network in networks.items()} == table


@pytest.mark.parametrize(
    ("make", "classes", "pixels", "full", "table"),
    [
        (models.resnet18, 10, 32, ("conv1", "layer1.0"), {2: "261.52", 4: "173.44", 8: "129.40"}),
        # The table prints 557.90 for f = 12: its ranks are rounded for the parameters and cut for the MACs.
        (
            models.resnet34,
            100,
            32,
            ("conv1", "layer1", "layer2"),
            {2: "747.24", 4: "633.99", 8: "577.37", 12: "558.20"},
        ),
        (models.resnet34, 200, 64, ("conv1", "layer1", "layer2"), {2: "2988.84", 4: "2535.85", 8: "2309.36"}),
    ],
)
def test_low_rank_columns_of_fedhm_table_8(
    make: Any, classes: int, pixels: int, full: tuple[str, ...], table: dict[int, str]
) -> None:
    with torch.device("meta"):
        networks = {factor: low_rank(make(classes=classes), full, factor) for factor in table}
    assert {factor: millions(network, pixels) for factor, network in networks.items()} == table


def test_products_alone_of_resnet18() -> None:
    assert cost.measure(models.resnet18().eval(), torch.empty(1, 3, 32, 32)).macs == 555_422_720


def test_the_extras_of_ptflops_by_hand() -> None:
    x = torch.randn(1, 2, 4, 4)
    assert cost.ptflops_macs(nn.BatchNorm2d(2), x) == 2 * 32
    assert cost.ptflops_macs(nn.BatchNorm2d(2, affine=False), x) == 32
    assert cost.ptflops_macs(nn.ReLU(), x) == 32
    assert cost.ptflops_macs(nn.MaxPool2d(2), x) == 32
    assert cost.ptflops_macs(nn.AdaptiveAvgPool2d(1), x) == 32
    assert cost.ptflops_macs(nn.Conv2d(2, 3, 1), x) == 16 * 6 + 16 * 3
    assert cost.ptflops_macs(nn.Linear(4, 3), x) == 8 * 12 + 8 * 3


def test_bytes_on_the_wire() -> None:
    assert cost.wire_bytes(models.vgg16()) == 4 * 15_253_578
    assert cost.wire_bytes(models.vgg16(), torch.float16) == 2 * 15_253_578
    norm = nn.BatchNorm1d(3)
    assert cost.wire_bytes(norm) == 4 * 6 + 4 * 6 + 8
    assert cost.wire_bytes(norm, torch.float16) == 2 * 6 + 4 * 6 + 8  # statistics travel as they are
    tensors = {"w": torch.zeros(5), "n": torch.zeros(3, dtype=torch.int64)}
    assert cost.wire_bytes(tensors, torch.float16) == 2 * 5 + 8 * 3
    assert cost.wire_bytes(tensors.values()) == 4 * 5 + 8 * 3


def test_seconds_on_a_link_are_table_7_of_fedpara() -> None:
    original = cost.wire_bytes(models.vgg16())
    assert round(cost.link_seconds(original, 2), 1) == 465.5
    assert round(cost.link_seconds(original, 50), 2) == 18.62
    assert int(cost.link_seconds(4 * 15.25e6, 50) * 100) == 1861  # as printed
    factorised = 4 * 1.547e6
    assert [int(cost.link_seconds(factorised, speed) * 100) for speed in (2, 10, 50)] == [4721, 944, 188]
    assert cost.link_seconds(2**20, 8, transfers=1) == 1.0
    with pytest.raises(ValueError, match="mbps must be greater than 0"):
        cost.link_seconds(1, 0)


def test_a_cost_prints_as_a_table() -> None:
    console = rich.console.Console(width=100, record=True, file=io.StringIO())
    console.print(cost.measure(models.mlp(), torch.randn(1, 784)))
    text = console.export_text()
    assert "fc1" in text
    assert "203,530" in text
    assert "saved for backward" in text
