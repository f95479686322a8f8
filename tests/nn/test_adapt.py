"""Fine-tuning a model: a frozen base, changes that start at zero, and tensors that are trained whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedfactor.factor import Additive, ChannelSplit, Core, Dense, Hadamard, LowRank, Scheme, SpatialSplit
from fedfactor.nn import Tune, adapt, compose, factor_weights, factorize
from fedfactor.nn.frozen import base_of, released
from fedfactor.nn.state import tensors_of
from tests.helpers.tiny import Tiny

SCHEMES = [
    Dense(), LowRank(rank=2), LowRank(ratio=0.25), Hadamard(rank=2), Hadamard(rank=2, personal=True),
    Hadamard(rank=2, tanh=True), Additive(rank=2), SpatialSplit(rank=2), Core(2),
]  # fmt: skip
X = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def tiny(scheme: Scheme, **options: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Tiny().eval()
    return model, adapt(model, scheme, targets=["conv2", "hidden"], train=["fc"], **options).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_change_starts_at_zero_and_is_trained(scheme: Scheme) -> None:
    model, adapted = tiny(scheme)
    assert torch.equal(adapted(X), model(X))
    before = {name: tensor.clone() for name, tensor in base_of(adapted).items()}
    parameters = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert {name.partition(".")[0] for name in parameters} == {"conv2", "hidden", "fc"}
    for _ in range(3):
        loss = adapted(X).square().mean()
        for p, gradient in zip(parameters.values(), torch.autograd.grad(loss, list(parameters.values())), strict=True):
            p.data -= 0.1 * gradient
    assert all(torch.equal(before[name], tensor) for name, tensor in base_of(adapted).items())
    for name, layer in factor_weights(adapted).items():
        assert layer.change().abs().max() > 0, name
        torch.testing.assert_close(layer.weight, layer.base + layer.change())
    plain = released(compose(adapted))
    torch.testing.assert_close(plain(X), adapted(X), rtol=1e-4, atol=1e-5)
    assert plain.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("scheme", [LowRank(rank=2), Hadamard(rank=2), Additive(rank=2)], ids=str)
def test_the_change_is_scaled_by_alpha_over_rank(scheme: Scheme) -> None:
    _, adapted = tiny(scheme, alpha=6.0)
    assert {layer.scale for layer in factor_weights(adapted).values()} == {3.0}
    _, dense = tiny(Dense(), alpha=6.0)
    assert {layer.scale for layer in factor_weights(dense).values()} == {1.0}, "a dense change has no rank"


def test_lora_by_hand() -> None:
    """W x + (alpha / r) B A x with B = [[1], [0]], A = [[2, 3]], alpha / r = 5."""
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    adapted = adapt(nn.Sequential(layer), LowRank(rank=1), alpha=5.0)
    assert tensors_of(adapted).keys() == {"0.u", "0.v"}
    adapted[0].u.data, adapted[0].v.data = torch.tensor([[1.0], [0.0]]), torch.tensor([[2.0, 3.0]])
    assert adapted(torch.tensor([[1.0, 1.0]])).tolist() == [[3.0 + 25.0, 7.0]]
    assert compose(adapted)[0].weight.tolist() == [[11.0, 17.0], [3.0, 4.0]]


def test_loras_a_starts_with_the_size_that_peft_gives_it() -> None:
    adapted = adapt(nn.Sequential(nn.Linear(400, 300)), LowRank(rank=100), generator=torch.Generator().manual_seed(0))
    assert adapted[0].v.detach().std() == pytest.approx(1 / (3 * 400) ** 0.5, rel=0.02)
    loha = adapt(nn.Sequential(nn.Linear(400, 300)), Hadamard(rank=100), generator=torch.Generator().manual_seed(0))
    assert loha[0].x1.detach().std() == pytest.approx(1 / (3 * 100) ** 0.5, rel=0.02)
    assert loha[0].y1.detach().std() == pytest.approx(1 / (3 * 400) ** 0.5, rel=0.02)
    assert not loha[0].y2.any() and loha[0].x2.any()


def test_a_copy_shares_what_is_frozen_with_the_given_model() -> None:
    model, adapted = tiny(LowRank(rank=2))
    assert adapted.conv2.base.data_ptr() == model.conv2.weight.data_ptr()
    assert adapted.conv1.weight.data_ptr() == model.conv1.weight.data_ptr()
    assert adapted.fc.weight.data_ptr() != model.fc.weight.data_ptr()
    assert all(parameter.requires_grad for parameter in model.parameters()), "the given model is not changed"
    assert copy.deepcopy(adapted).conv2.base.data_ptr() == model.conv2.weight.data_ptr()


def test_norms_outside_of_train_use_the_statistics_of_the_base() -> None:
    model, adapted = tiny(LowRank(rank=2))
    adapted.train()(X)
    assert adapted.bn1.num_batches_tracked == 0 and "bn1.running_mean" in base_of(adapted)
    trained = adapt(model, LowRank(rank=2), targets=["conv2"], train=["bn1"]).train()
    trained(X)
    assert trained.bn1.num_batches_tracked == 1 and "bn1.running_mean" in tensors_of(trained)


def test_attention_and_recurrent_layers_can_be_adapted() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    adapted = adapt(layer, LowRank(rank=2), train=["linear2"]).eval()
    torch.testing.assert_close(adapted(x), layer(x))
    assert tensors_of(adapted).keys() == {
        "self_attn.in_proj.u", "self_attn.in_proj.v", "linear2.weight", "linear2.bias"
    }  # fmt: skip
    lstm = adapt(nn.LSTM(3, 4), LowRank(rank=2), targets=["weight_ih_l0"])
    assert tensors_of(lstm).keys() == {"weight_ih_l0.u", "weight_ih_l0.v"}
    again = factorize(adapt(layer, Dense(), train=["linear2"]), LowRank(rank=2))
    assert tensors_of(again).keys() == tensors_of(adapted).keys()


def test_only_changes_are_factorised_again_and_keep_what_was_trained() -> None:
    model, dense = tiny(Dense())
    low = factorize(dense, LowRank(rank=2))
    assert {name: str(layer.scheme) for name, layer in factor_weights(low).items()}.keys() == {"conv2", "hidden"}
    assert type(low.fc) is nn.Linear and torch.equal(low(X), model(X))
    change = torch.outer(torch.arange(32.0), torch.ones(256)) / 1000
    dense.hidden.w.data.copy_(change)
    kept = factorize(dense, LowRank(rank=2), keep_weights=True)
    torch.testing.assert_close(kept.hidden.change(), change)
    assert not factorize(dense, LowRank(rank=2)).hidden.change().any()


class Bert(nn.Module):
    """The names of a model of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        names = ("query", "key", "value", "dense")
        self.layer = nn.ModuleList(nn.ModuleDict({name: nn.Linear(4, 4) for name in names}) for _ in range(2))
        self.conv = nn.Conv2d(4, 4, 3, groups=4)
        self.classifier = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input: only names matter."""
        return x


def test_default_targets() -> None:
    assert factor_weights(adapt(Bert(), LowRank(rank=1))).keys() == {
        f"layer.{number}.{name}" for number in range(2) for name in ("query", "value")
    }
    assert factor_weights(adapt(Tiny(), Dense(), train=["fc"])).keys() == {"conv1", "conv2", "hidden"}
    grouped = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, groups=4))
    assert factor_weights(adapt(grouped, Dense())).keys() == {"0"}, "what cannot be adapted is frozen"


@pytest.mark.parametrize(
    ("targets", "train", "scheme", "reason"),
    [
        (
            ["querry"],
            [],
            Dense(),
            r"tune.targets: 'querry' matches no layer; did you mean 'query'\? layers are layer.0.query",
        ),
        (["conv"], [], Dense(), r"'conv' matches no layer that can be adapted: conv: grouped convolution"),
        (["query"], ["clasifier"], Dense(), r"tune.train: 'clasifier' matches no tensor; .*layer.0.query.weight"),
        (["query"], ["layer.0"], Dense(), r"'layer.0.query' is matched by tune.targets and by tune.train"),
        (["query"], [], LowRank(rank=5), r"layer 'layer.0.query' \(4 x 4\): rank must lie in \[1, 4\], got 5"),
        (["query"], [], Hadamard(rank=5), r"layer 'layer.0.query' \(4 x 4\): rank must lie in \[1, 4\], got 5"),
        (["query"], [], Core(5), r"layer 'layer.0.query' \(4 x 4\): rank must lie in \[1, 4\], got 5"),
    ],
)
def test_mistakes_are_named(targets: list[str], train: list[str], scheme: Scheme, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        adapt(Bert(), scheme, targets=targets, train=train)


@pytest.mark.parametrize("options", [{"alpha": 0.0}, {"alpha": -1.0}, {"targets": "query"}, {"train": "fc"}])
def test_settings_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"tune.{next(iter(options))} must be"):
        Tune(**options)  # type: ignore[arg-type]


def test_only_whole_tensors_are_trained_where_no_layer_is_a_target() -> None:
    probe = adapt(Tiny(), ChannelSplit(rank=1), targets=["none"], train=["fc"])
    assert not factor_weights(probe) and tensors_of(probe).keys() == {"fc.weight", "fc.bias"}
    whole = adapt(Tiny(), ChannelSplit(rank=1), train=["*"])
    assert not factor_weights(whole) and tensors_of(whole).keys() == Tiny().state_dict().keys()
    for tuned in (probe, whole):  # what is trained whole is not factorised either
        assert not factor_weights(factorize(tuned, ChannelSplit(rank=1)))
    assert factor_weights(factorize(compose(whole), ChannelSplit(rank=1))), "a composed model is like any other"
    with pytest.raises(ValueError, match=r"tune.targets is 'none', and tune.train lists no tensor"):
        adapt(Tiny(), ChannelSplit(rank=1), targets=["none"])
