"""Layers made of factors: what they replace, what they keep, and what comes back when they are composed."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn

from fedfactor.cost import measure
from fedfactor.factor import (
    Additive,
    ChannelSplit,
    Composition,
    Dense,
    Hadamard,
    LowRank,
    SpatialSplit,
    WeightNorm,
)
from fedfactor.factor.base import Scheme
from fedfactor.nn import (
    FactorConv2d,
    FactorLinear,
    FactorWeight,
    check,
    compose,
    composed_once,
    factor_weights,
    factorize,
    first_layers,
    weight_norm,
)

# What torch says of its own layers: "same" padding copies with an even kernel, projections run unfused.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]

SCHEMES: list[Scheme] = [
    Hadamard(gamma=0.3),
    Hadamard(gamma=0.3, tanh=True),
    Hadamard(gamma=0.3, personal=True),
    LowRank(ratio=0.3),
    Composition(r1=4, r2=3),
    Additive(linear=0.3, conv=0.3),
    SpatialSplit(ratio=0.3),
    ChannelSplit(ratio=0.3),
    WeightNorm(Hadamard(gamma=0.3)),
]


def ids(scheme: Scheme) -> str:
    return str(scheme)


class Net(nn.Module):
    """One layer of every supported feed-forward kind, in awkward settings."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, stride=2, padding=1, dilation=1)
        self.same = nn.Conv2d(16, 16, 4, padding="same", bias=False)
        self.reflect = nn.Conv2d(16, 12, 3, padding=2, dilation=2, padding_mode="reflect")
        self.grouped = nn.Conv2d(12, 12, 3, padding=1, groups=3)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(12 * 36, 20), nn.ReLU(), nn.Linear(20, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.grouped(self.reflect(self.same(self.conv(x)))))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_same_function(factored: nn.Module, plain: nn.Module, *inputs: Tensor) -> None:
    a, b = factored.eval()(*inputs), plain.eval()(*inputs)
    a, b = (a[0], b[0]) if isinstance(a, tuple) else (a, b)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.detach().abs().max()))


@pytest.mark.parametrize("scheme", SCHEMES, ids=ids)
def test_composed_network_computes_the_same_and_is_plain(scheme: Scheme) -> None:
    torch.manual_seed(0)
    dense = Net()
    factored = factorize(dense, scheme, generator=generator())
    assert isinstance(factored.conv, FactorConv2d)
    plain = compose(factored)
    x = torch.randn(3, 8, 12, 12)
    assert_same_function(factored, plain, x)
    assert not factor_weights(plain)
    assert {name: t.shape for name, t in plain.state_dict().items()} == {
        name: t.shape for name, t in dense.state_dict().items()
    }
    pickle.loads(pickle.dumps(plain))
    exported = torch.export.export(plain.eval(), (x,)).module()
    torch.testing.assert_close(exported(x), plain(x))


@pytest.mark.parametrize("scheme", SCHEMES, ids=ids)
def test_factor_layers_train_pickle_copy_and_change_type(scheme: Scheme) -> None:
    model = factorize(Net(), scheme, generator=generator())
    x = torch.randn(2, 8, 12, 12)
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(x), model(x), rtol=0, atol=0)
    assert model.double()(x.double()).dtype is torch.float64


def test_weights_start_as_large_as_those_they_replace_and_from_the_generator() -> None:
    dense = nn.Linear(300, 200)
    nn.init.normal_(dense.weight, std=0.01)
    one, two = (factorize(dense, Hadamard(gamma=0.2), generator=generator(7)) for _ in range(2))
    other = factorize(dense, Hadamard(gamma=0.2), generator=generator(8))
    assert float(one.weight.detach().std()) == pytest.approx(0.01, rel=0.1)
    assert torch.equal(one.x1, two.x1) and not torch.equal(one.x1, other.x1)


def test_keep_weights_starts_from_the_weight_where_the_scheme_can() -> None:
    dense = Net()
    x = torch.randn(2, 8, 12, 12)
    assert_same_function(factorize(dense, Additive(), keep_weights=True), dense, x)
    assert_same_function(factorize(dense, ChannelSplit(ratio=1.0), keep_weights=True), dense, x)
    with pytest.raises(ValueError, match=r"'conv'.*no closed form"):
        factorize(dense, LowRank(blocks=2), keep_weights=True)


def test_a_composed_model_can_share_tensors_and_is_freed_at_once() -> None:
    model = factorize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), LowRank(ratio=0.5), skip=["1"])
    gc.disable()  # nothing may wait for the collector: models are large
    try:
        plain = compose(model, shared=True)
        kept = plain.get_submodule("1"), model.get_submodule("1")
        assert type(plain.get_submodule("0")) is nn.Linear and kept[0] is not kept[1]
        assert kept[0].weight is kept[1].weight and compose(model).get_parameter("1.weight") is not kept[1].weight
        gone = weakref.ref(plain)
        del plain
        assert gone() is None
    finally:
        gc.enable()


def test_factorize_leaves_the_given_model_alone() -> None:
    dense = Net()
    before = copy.deepcopy(dense.state_dict())
    factorize(dense, LowRank())
    assert isinstance(dense.conv, nn.Conv2d)
    assert all(torch.equal(before[name], tensor) for name, tensor in dense.state_dict().items())


def test_check_lists_all_reasons_at_once() -> None:
    net = Net()
    net.table = nn.Embedding(5, 6)
    net.small = nn.Linear(10, 10)
    net.tied = nn.Linear(6, 5)
    net.tied.weight = net.table.weight
    found = {finding.layer: finding.reason for finding in check(net, Hadamard(gamma=0.1))}
    assert set(found) == {"grouped", "small", "head.3", "tied", "table.weight"}
    assert "3 groups" in found["grouped"]
    assert "table.weight" in found["tied"]
    assert "Embedding" in found["table.weight"]
    factored = factorize(net, Hadamard(gamma=0.1))
    assert type(factored.small) is nn.Linear and type(factored.grouped) is nn.Conv2d
    assert factored.tied.weight is factored.table.weight


def test_patterns_choose_layers() -> None:
    net = Net()
    model = factorize(net, LowRank(ratio=0.5), skip=["head"], per_layer={"sa*": LowRank(rank=1), "conv": None})
    assert set(factor_weights(model)) == {"same", "reflect"}
    assert model.same.x.shape == (16, 1) and model.reflect.x.shape == (12, 6)


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        (LowRank(), {"skip": ["heed"]}, r"'heed' matches no layer that could.* head"),
        (LowRank(), {"per_layer": {"convolution": None}}, r"'convolution' matches no layer"),
        (Hadamard(gamma=1.5), {}, r"'conv' \(16 x 8 x 3 x 3\): gamma must lie in \[0, 1\], got 1.5"),
        (LowRank(rank=9), {}, r"'conv' \(16 x 8 x 3 x 3\): rank must lie in \[1, 8\], got 9"),
        (ChannelSplit(ratio=0.0), {}, r"'conv'.*ratio must lie in"),
        (Composition(r1=3), {}, r"'conv'.*r1 must divide the 8 inputs, got 3"),
    ],
)
def test_bad_settings_name_the_layer_and_the_legal_range(
    scheme: Scheme, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        factorize(Net(), scheme, **options)  # type: ignore[arg-type]


def test_factorising_twice_is_refused_by_check_not_done_silently() -> None:
    model = factorize(Net(), LowRank())
    assert {f.layer for f in check(model, Hadamard())} >= {"conv", "same", "reflect"}
    assert "already factorised" in check(model, Hadamard())[0].reason


def test_a_module_used_twice_stays_one_module() -> None:
    shared = nn.Linear(16, 16)
    model = factorize(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": shared}), LowRank(ratio=0.5))
    assert model["a"] is model["b"][0] is model["c"]
    assert isinstance(model["a"], FactorLinear)
    plain = compose(model)
    assert plain["a"] is plain["b"][0] is plain["c"]


@pytest.mark.parametrize(
    "scheme", [Hadamard(gamma=0.3), LowRank(ratio=0.2), ChannelSplit(), Composition(r1=4, r2=3)], ids=ids
)
@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(12, 16, num_layers=2, bidirectional=True, batch_first=True),
        nn.LSTM(12, 16, proj_size=8),
        nn.GRU(12, 16, bias=False),
        nn.RNN(12, 24, nonlinearity="relu"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_recurrent_layers(layer: nn.RNNBase, scheme: Scheme) -> None:
    factored = factorize(layer, scheme, generator=generator())
    assert isinstance(factored, type(layer))
    assert isinstance(factored.weight_ih_l0, FactorWeight)
    x = torch.randn(5, 3, 12)
    plain = compose(factored)
    assert_same_function(factored, plain, x)
    assert list(plain.state_dict()) == list(layer.state_dict())
    factored(x)[0].sum().backward()
    assert all(p.grad is not None for p in factored.parameters())
    twin = pickle.loads(pickle.dumps(copy.deepcopy(factored)))
    torch.testing.assert_close(twin(x)[0], factored(x)[0], rtol=0, atol=0)
    assert factored.double()(x.double())[0].dtype is torch.float64
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 12), torch.randn(2, 12)])
    with_packed = plain(packed)[0].data
    torch.testing.assert_close(factored.float()(packed)[0].data, with_packed, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 24, "vdim": 40}], ids=["fused", "separate"])
def test_attention(sizes: dict[str, int]) -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=True, **sizes)
    factored = factorize(layer, Hadamard(gamma=0.3), generator=generator())
    inputs = (
        torch.randn(2, 5, 32),
        torch.randn(2, 5, sizes.get("kdim", 32)),
        torch.randn(2, 5, sizes.get("vdim", 32)),
    )
    plain = compose(factored)
    assert_same_function(factored, plain, *inputs)
    assert set(plain.state_dict()) == set(layer.state_dict())
    assert isinstance(factored.out_proj, FactorLinear)
    pickle.loads(pickle.dumps(copy.deepcopy(factored)))


@pytest.mark.parametrize("scheme", [Hadamard(gamma=0.3), ChannelSplit(), Additive(linear=0.2)], ids=ids)
def test_transformer_encoder(scheme: Scheme) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model = factorize(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), scheme, generator=generator())
    assert len(factor_weights(model)) == 8
    x = torch.randn(2, 5, 32)
    plain = compose(model)
    assert_same_function(model, plain, x)
    with torch.no_grad():  # torch's fused inference path reads the weights as attributes
        fused = model.eval()(x)
    torch.testing.assert_close(fused, plain.eval()(x), rtol=1e-4, atol=1e-5)
    model.train()(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    torch.export.export(plain, (x,))


def test_weight_norm_is_kept_by_factorize_and_folded_in_by_compose() -> None:
    layer = nn.LSTM(12, 16)
    x = torch.randn(5, 3, 12)
    normed = weight_norm(layer)
    assert_same_function(normed, layer, x)
    with torch.no_grad():
        normed.weight_ih_l0.w.mul_(5)  # the direction's length does not matter
    assert_same_function(normed, layer, x)
    factored = factorize(normed, Hadamard(gamma=0.0), skip=["weight_hh_l0"])
    assert factored.weight_ih_l0.scheme == WeightNorm(Hadamard(gamma=0.0))
    assert factored.weight_hh_l0.scheme == WeightNorm(Dense())
    plain = compose(factored)
    assert type(plain) is nn.LSTM
    torch.testing.assert_close(plain.weight_ih_l0.norm(dim=1), factored.weight_ih_l0.g.detach())
    assert_same_function(factored, plain, x)


def test_models_on_the_meta_device_are_factorised_by_shape_alone() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16 * 36, 10))
    factored = factorize(model, Hadamard(gamma=0.2))
    assert factored[0].t1.is_meta
    assert factored(torch.empty(2, 8, 8, 8, device="meta")).shape == (2, 10)


def test_first_layers_names_the_full_ones_of_a_hybrid() -> None:
    assert first_layers(Net(), 2) == ["conv", "same"]
    with pytest.raises(ValueError, match="6 layers"):
        first_layers(Net(), 7)


def test_composition_warns_where_its_basis_cannot_be_orthonormal() -> None:
    with pytest.warns(UserWarning, match="cannot be orthonormal"):
        factorize(nn.Linear(16, 16), Composition(r1=4, r2=5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        factorize(nn.Linear(16, 16), Composition(r1=4, r2=4))


def test_frozen_weights_stay_frozen_both_ways() -> None:
    model = nn.ModuleDict({"fc": nn.Linear(32, 32), "lstm": nn.LSTM(12, 16)})
    model["fc"].weight.requires_grad_(False)
    model["lstm"].bias_ih_l0.requires_grad_(False)
    factored = factorize(model, LowRank(ratio=0.3))
    assert not factored["fc"].x.requires_grad and factored["fc"].bias.requires_grad
    plain = compose(factored)
    frozen = {name for name, parameter in plain.named_parameters() if not parameter.requires_grad}
    assert frozen == {"fc.weight", "lstm.bias_ih_l0"}


def test_compose_keeps_parameters_that_recurrent_layers_share() -> None:
    model = nn.ModuleDict({"a": nn.LSTM(12, 16), "b": nn.LSTM(12, 16)})
    model["b"].bias_ih_l0, model["b"].weight_hh_l0 = model["a"].bias_ih_l0, model["a"].weight_hh_l0
    plain = compose(factorize(model, LowRank(ratio=0.3)))
    assert plain["a"].bias_ih_l0 is plain["b"].bias_ih_l0
    assert plain["a"].weight_hh_l0 is plain["b"].weight_hh_l0


def test_hooks_of_replaced_layers_still_fire() -> None:
    seen: list[str] = []
    layer = nn.Sequential(nn.Linear(16, 16))
    layer[0].register_forward_hook(lambda module, inputs, output: seen.append(type(module).__name__))
    factored = factorize(layer, LowRank(ratio=0.5))
    factored(torch.randn(2, 16))
    compose(factored)(torch.randn(2, 16))
    assert seen == ["FactorLinear", "Linear"]


def test_weights_that_are_computed_from_others_are_left_alone() -> None:
    normed = nn.Sequential(nn.utils.spectral_norm(nn.Linear(16, 16)))
    assert "computed from other tensors" in check(normed, LowRank())[0].reason
    assert "weight_orig" in factorize(normed, LowRank())[0].state_dict()


def test_a_single_pattern_may_be_a_word() -> None:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(11)])
    assert set(factor_weights(factorize(model, LowRank(), skip="10"))) == {str(i) for i in range(10)}


@pytest.mark.parametrize("rank", [2.5, 2.0, True, "2"], ids=repr)
def test_a_rank_of_the_wrong_type_is_refused_by_name(rank: object) -> None:
    for scheme in (Hadamard(rank=rank), LowRank(rank=rank), ChannelSplit(rank=rank)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"'conv'.*rank must be a whole number in"):
            factorize(Net(), scheme)
    with pytest.raises(ValueError, match=r"gamma must be a number in \[0, 1\], got 'a'"):
        factorize(Net(), Hadamard(gamma="a"))  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", SCHEMES, ids=ids)
def test_one_example_without_a_batch(scheme: Scheme) -> None:
    layer = factorize(nn.Conv2d(16, 24, 3), scheme)
    x = torch.randn(16, 13, 13)
    torch.testing.assert_close(layer(x), layer(x[None])[0])


@pytest.mark.parametrize("scheme", SCHEMES, ids=ids)
@pytest.mark.parametrize(
    ("layer", "x"),
    [(nn.Linear(64, 48), torch.zeros(7, 64)), (nn.Conv2d(32, 48, 3), torch.zeros(4, 32, 7, 7))],
    ids=["fc", "conv"],
)
def test_counted_operations_are_the_ones_done(scheme: Scheme, layer: nn.Module, x: Tensor) -> None:
    factored = factorize(layer, scheme)
    positions = 7 if x.dim() == 2 else 4 * 25
    counted = factored.scheme.macs(factored.shape, positions)
    if x.dim() == 4:  # without padding, a convolution before the last one still sees pixels that are used up later
        counted += factored.v.numel() * 4 * (7 * 5 - 25) if isinstance(scheme, SpatialSplit) else 0
        counted += factored.y.numel() * 4 * (7 * 7 - 25) if isinstance(scheme, LowRank) else 0
    assert measure(factored, x).macs == counted


def test_composing_once_nests_and_is_not_copied() -> None:
    layer = factorize(nn.Linear(16, 16), LowRank(ratio=0.5))
    with composed_once(layer) as outer:
        with composed_once(layer):
            pass
        assert layer.weight is outer[""]
        twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.x.zero_()
    assert not twin(torch.randn(1, 16)).sub(twin.bias).any()
    assert layer._held is None
