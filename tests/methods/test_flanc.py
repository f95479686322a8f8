"""FLANC against its paper: counts, bases, both averages, the penalty."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfactor import models
from fedfactor.factor import Composition
from fedfactor.methods import FLANC, Participant
from fedfactor.nn import factor_weights, factorize
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.plan import Reply, pull
from tests.helpers.folding import folded
from tests.helpers.networks import Text
from tests.helpers.tiny import Tiny, data, run, task

WIDTHS = (1.0, 0.75, 0.5, 0.25)
# Both convolutions of a block share the first one's R1 (the authors' ResNet).
BLOCKS = {"layer2.0.conv*": (8, 32), "layer3.0.conv*": (16, 64), "layer4.0.conv*": (32, 128)}
LSTM = {"lstm": (32, 30)}


@pytest.mark.parametrize(
    ("model", "options", "bases", "counts"),
    [
        ("resnet18", {"scale_stem": False}, BLOCKS, [530_858, 1_219_594, 2_362_986, 3_956_810]),
        ("cnn4", {}, {}, [33_482, 63_498, 97_610, 135_818]),
    ],
)
def test_clients_have_as_many_parameters_as_table_1_says(
    model: str, options: dict[str, Any], bases: dict[str, tuple[int, int]], counts: list[int]
) -> None:
    method = FLANC(bases=bases).bind(task(), WIDTHS)
    for width, count in zip(reversed(WIDTHS), counts, strict=True):
        network = method.network(lambda w: models.build(model, width=w, **options), width)
        assert sum(p.numel() for p in network.parameters()) == count


def test_a_recurrent_network_has_the_table_s_gates() -> None:
    method = FLANC(bases=LSTM).bind(task(), WIDTHS)
    lstm = method.network(lambda w: models.build("rnn_shakespeare", width=w), 0.25).get_submodule("lstm")
    counts = {name: p.numel() for name, p in lstm.named_parameters()}
    assert sum(counts.values()) - counts["bias_hh_l0"] == 48_256  # 48 K; torch has a second bias


def test_r1_is_a_common_divisor_and_r2_a_share() -> None:
    method = FLANC().bind(task(), (1.0, 0.5))
    bases = {n: (w.scheme.r1, w.scheme.r2) for n, w in factor_weights(method.network(Tiny, 0.5)).items()}
    # conv2: inputs 8 and 4, half of 4 is 2; outputs 16. hidden: inputs 256 and 128, half is 64; outputs 32.
    assert bases == {"conv2": (2, 4), "hidden": (64, 8)}
    for width in (1.0, 0.5):
        shapes = {n: tuple(w.factors["v"].shape) for n, w in factor_weights(method.network(Tiny, width)).items()}
        assert shapes == {"conv2": (4, 2, 3, 3), "hidden": (8, 64)}


def test_bases_can_be_set_and_must_divide() -> None:
    method = FLANC(bases={"conv2": (4, 7)}).bind(task(), (1.0, 0.5))
    assert factor_weights(method.network(Tiny, 1.0))["conv2"].factors["v"].shape == (7, 4, 3, 3)
    with pytest.raises(ValueError, match=r"layer 'conv2' .*r1 must divide the 8 inputs, got 3"):
        FLANC(bases={"conv2": (3, 7)}).bind(task(), (1.0, 0.5)).network(Tiny, 1.0)
    with pytest.raises(ValueError, match=r"capacity 0\.5 need that width"):
        FLANC(widths=(1.0,)).bind(task(), (1.0, 0.5))
    with pytest.raises(ValueError, match="no inner layer to compose"):
        run("flanc", model=lambda width=1.0: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


class Small(nn.Module):
    """One inner layer between two outer ones."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        self.inner = nn.Linear(4, int(4 * width), bias=False)
        self.fc = nn.Linear(int(4 * width), 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.inner(x).relu())


def test_eq_4_averages_the_basis_over_all_and_the_rest_within_a_width() -> None:
    method = FLANC(bases={"inner": (2, 1)}).bind(task(), (1.0, 0.5, 0.25))
    networks = {width: method.network(Small, width) for width in method.widths}
    server = method.initial(networks.__getitem__)
    assert set(server) == {"inner.v"} | {f"{n}@{w:g}" for n in ("inner.u", "fc.weight") for w in method.widths}
    server = {name: torch.zeros_like(tensor) for name, tensor in server.items()}

    def reply(client: int, width: float, samples: int, value: float) -> Reply:
        plan = method.plan(server, Participant(client, width, 0), networks[width], None)
        down = pull(server, plan)
        return Reply(client, width, samples, plan, down, {n: torch.full_like(t, value) for n, t in down.items()}, {})

    replies = [reply(0, 1.0, 10, 1.0), reply(1, 0.5, 30, 2.0), reply(2, 0.5, 10, 4.0)]
    mean, held = folded(method, server, replies, networks.__getitem__)
    assert mean["inner.v"].unique().tolist() == pytest.approx([(10 * 1 + 30 * 2 + 10 * 4) / 50])
    for name in ("inner.u", "fc.weight"):
        assert mean[f"{name}@1"].unique().tolist() == [1.0]
        assert mean[f"{name}@0.5"].unique().tolist() == pytest.approx([(30 * 2 + 10 * 4) / 40])
        assert mean[f"{name}@0.25"].unique().tolist() == [0.0] and held[f"{name}@0.25"] == 0


class Identity(FLANC):
    """V frozen to the identity: U is the weight itself."""

    def network(self, build: Any, capacity: float) -> nn.Module:
        model, bases = build(capacity), {"conv2": Composition(8, 72), "hidden": Composition(256, 256)}
        made = factorize(model, bases["conv2"], skip=["conv1", "fc"], per_layer=bases)
        for name, layer in factor_weights(made).items():
            u, v = layer.factors["u"], layer.factors["v"]
            u.data.copy_(tensors_of(model)[f"{name}.weight"].reshape(u.shape))
            v.data.copy_(torch.eye(len(v)).view_as(v))
            v.requires_grad_(False)
        return made


def test_with_the_identity_as_basis_and_no_penalty_it_is_fedavg() -> None:
    settings = {"capacities": {1.0: 1.0}, "data": data(even=False)}
    ours, theirs = run(Identity(strength=0.0), **settings), run("fedavg", **settings)
    start = run("fedavg", rounds=0, **settings).server.tensors
    for name, tensor in theirs.server.tensors.items():
        layer = name.removesuffix(".weight")
        u = ours.server.tensors.get(f"{layer}.u@1")
        found = ours.server.tensors[f"{name}@1"] if u is None else u.view_as(tensor)
        assert torch.equal(found, tensor), name
        if name.endswith("weight"):
            assert not torch.allclose(tensor, start[name], atol=1e-4)


def test_the_penalty_keeps_the_basis_orthogonal() -> None:
    def error(strength: float) -> float:
        v = run(FLANC(strength=strength), rounds=3, epochs=3).server.tensors["conv2.v"].flatten(1)
        return float((v @ v.T - torch.eye(len(v))).abs().max())

    assert error(10.0) < 0.3 * error(0.0)


def test_usage_and_gram_matrices_are_logged() -> None:
    result = run("flanc", evaluate_every=2)
    first, last = [event.get("observed", {}) for event in result.history if event["event"] == "round"]
    assert not first
    v, u = result.server.tensors["conv2.v"].flatten(1), result.server.tensors["conv2.u@0.5"]
    torch.testing.assert_close(torch.tensor(last["gram"]["conv2"]), v @ v.T, rtol=0, atol=1e-4)
    used = u.abs().view(len(u), -1, len(v)).mean((0, 1))
    torch.testing.assert_close(torch.tensor(last["mean_abs_u"]["conv2"]["0.5"]), used, rtol=0, atol=1e-4)


def test_a_recurrent_network_trains() -> None:
    result, start = (run(FLANC(bases={"lstm": (2, 2)}), model=Text, rounds=n) for n in (1, 0))
    for name in ("lstm.weight_ih_l0.v", "lstm.weight_hh_l0.v", "lstm.weight_hh_l0.u@0.5", "fc.weight@1"):
        assert not torch.equal(result.server.tensors[name], start.server.tensors[name]), name
    assert isinstance(result.model_at(0.5).lstm, nn.LSTM) and result.model_at(0.5).lstm.hidden_size == 4


def test_widths_without_a_common_divisor_leave_a_layer_dense() -> None:
    def build(width: float) -> nn.Module:
        return models.build("cnn4", width=width)

    odd = FLANC().bind(task(), (1.0, 0.64, 0.35))
    assert set(factor_weights(odd.network(build, 0.64))) == {"conv1"}  # conv2's inputs are 128, 82 and 45
    with pytest.raises(ValueError, match=r"no network of width 0\.3: the run's widths are 1, 0\.5"):
        run("flanc", rounds=0).model_at(0.3)
