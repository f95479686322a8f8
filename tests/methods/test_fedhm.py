"""FedHM: the SVD goes out, composed changes come back."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedfactor.methods import FedHM
from fedfactor.nn import factor_weights
from fedfactor.protocol.plan import Piece, Reply, whole_plan
from fedfactor.tables import fedhm as printed
from fedfactor.tables.counting import network, parameters
from tests.helpers.folding import folded
from tests.helpers.networks import Text
from tests.helpers.tiny import decaying, run, skewed


def reply(capacity: float, **tensors: torch.Tensor) -> Reply:
    reference = {name.replace("__", "."): torch.zeros_like(tensor) for name, tensor in tensors.items()}
    return Reply(
        0, capacity, 1, whole_plan(reference), reference, {n.replace("__", "."): t for n, t in tensors.items()}, {}
    )


def test_weights_are_a_softmax_of_the_capacities() -> None:
    """The paper's formula with tau = 5 for capacities 1, 1/2, 1/4, 1/8: .277, .251, .239, .233."""
    replies = [reply(capacity, b=torch.eye(4)[i]) for i, capacity in enumerate((1.0, 0.5, 0.25, 0.125))]
    wanted = {5.0: (0.277, 0.251, 0.239, 0.233), math.inf: (0.25, 0.25, 0.25, 0.25), 1e-5: (1.0, 0.0, 0.0, 0.0)}
    for tau, shares in wanted.items():
        for order in (replies, replies[::-1]):  # a larger capacity may come later
            mean, _ = folded(FedHM(tau=tau), {"b": torch.zeros(4)}, order)
            assert mean["b"].tolist() == pytest.approx(shares, abs=5e-4)


def test_low_rank_clients_get_the_leading_components() -> None:
    result = run(FedHM(), rounds=0)
    setup, server = result.federation.setup, result.server.tensors
    small = setup.network(0.5)
    assert set(factor_weights(small)) == {"conv2", "hidden"}  # conv1 is the first layer, fc the classifier
    view = setup.method.prepare(server, {0.5: small, 1.0: setup.network(1.0)}, training=True)
    u, s, vh = torch.linalg.svd(server["hidden.weight"])
    rank = 16
    best = (u[:, :rank] * s[:rank]) @ vh[:rank]
    torch.testing.assert_close(view["hidden.u"] @ view["hidden.v"], best, rtol=1e-2, atol=1e-3)


def test_two_clients_by_hand() -> None:
    """One dense client changes W by 2, one of rank 1 by u v: the mean of both is added to the server."""
    networks = run(FedHM(rho=0), rounds=0).federation.setup.network
    small = networks(0.5)
    layer = factor_weights(small)["hidden"]
    shapes = {name: factor.shape for name, factor in layer.factors.items()}
    server = {"hidden.weight": torch.ones(32, 256)}
    dense = reply(1.0, hidden__weight=torch.full((32, 256), 2.0))
    low = reply(0.5, hidden__u=torch.full(shapes["u"], 0.5), hidden__v=torch.full(shapes["v"], 0.25))
    method = FedHM()
    composed = 0.5 * 0.25 * shapes["v"][0]

    def only_hidden(capacity: float) -> torch.nn.Module:
        holder = torch.nn.Module()
        if capacity < 1:
            holder.hidden = layer
        return holder

    mean, held = folded(method, server, [dense, low], only_hidden)
    torch.testing.assert_close(mean["hidden.weight"], torch.full((32, 256), 1 + (2 + composed) / 2))
    assert held["hidden.weight"] == 2
    literal, _ = folded(FedHM(literal=True), server, [dense, low], only_hidden)
    torch.testing.assert_close(literal["hidden.weight"], torch.full((32, 256), (2 + composed) / 2))


def test_what_truncation_cut_off_stays_on_the_server_unless_literal() -> None:
    start = run(FedHM(), rounds=0).server.tensors["hidden.weight"]
    kept = run(FedHM(), epochs=0, capacities={0.25: 1.0}).server.tensors["hidden.weight"]
    torch.testing.assert_close(kept, start)
    erased = run(FedHM(literal=True), epochs=0, capacities={0.25: 1.0}).server.tensors["hidden.weight"]
    assert int(torch.linalg.matrix_rank(erased, rtol=1e-4)) == 8 < int(torch.linalg.matrix_rank(start, rtol=1e-4))


def test_frobenius_decay_takes_the_place_of_weight_decay_on_factors() -> None:
    network = run(FedHM(), rounds=0).federation.setup.network(0.5)
    decays = decaying(FedHM(), network)
    assert not decays["hidden.u"] and not decays["conv2.v"] and decays["hidden.bias"] and decays["fc.weight"]
    assert all(decaying(FedHM(frobenius=False), network).values())
    settings = {"weight_decay": 0.1, "capacities": {0.5: 1.0}}
    assert (
        run(FedHM(), **settings).summary["weights_sha256"]
        != run(FedHM(frobenius=False), **settings).summary["weights_sha256"]
    )


# rho counts layers in order of definition, the 1 x 1 shortcut of layer2 among them.
@pytest.mark.parametrize(("dataset", "rho"), [("CIFAR-10", 3), ("CIFAR-100", 16)])
def test_sub_models_have_the_parameters_of_the_tables(dataset: str, rho: int) -> None:
    base, classes, _ = printed.BASES[dataset]
    for factor in printed.LOW_RANK[dataset]:
        small = FedHM(rho=rho).network(lambda width: network(base, classes=classes), 1 / factor)
        assert parameters(small) == parameters(printed.Network(base, classes, 32, factor).model)
    counts = {f: parameters(FedHM(rho=3).network(lambda width: network("resnet18"), 1 / f)) for f in (1, 2, 4, 8)}
    assert counts == {1: 11_173_962, 2: 4_157_514, 4: 2_209_866, 8: 1_236_042}


def test_the_model_without_full_layers_has_rank_k_everywhere() -> None:
    """Section 4.4: 2 % of the parameters, whatever the capacity below 1."""
    full = network("resnet18")
    least = FedHM(rho=0, rank=3).network(lambda width: full, 0.125)
    assert {layer.factors["v"].shape[0] for layer in factor_weights(least).values()} == {3}
    assert set(factor_weights(least)) >= {"conv1", "layer4.1.conv2"} and "fc" not in factor_weights(least)
    assert parameters(least) / parameters(full) == pytest.approx(0.02, abs=0.005)
    result = run(FedHM(rho=0, rank=3), capacities={0.1: 1.0})
    assert {layer.factors["v"].shape[0] for layer in factor_weights(result.federation.setup.network(0.1)).values()} == {
        3
    }


def test_groups_without_a_full_client_serve_their_own_levels() -> None:
    """FedHM-V2: half of the clients at 1/2, a quarter each at 1/4 and 1/8; the server stays dense."""
    result = run(FedHM(), capacities={0.5: 0.5, 0.25: 0.25, 0.125: 0.25}, cohort=6)
    assert list(result.history[-1]["global"]) == ["0.5", "0.25", "0.125"]
    assert result.server.tensors["hidden.weight"].shape == (32, 256)


def test_recurrent_weights_are_split_too() -> None:
    result, start = (run(FedHM(rho=0), model=Text, capacities={0.5: 1.0}, rounds=n) for n in (1, 0))
    assert set(factor_weights(result.federation.setup.network(0.5))) == {"lstm.weight_ih_l0", "lstm.weight_hh_l0"}
    moved = result.server.tensors["lstm.weight_hh_l0"] != start.server.tensors["lstm.weight_hh_l0"]
    assert moved.float().mean() > 0.9


def test_self_distillation_by_its_definition() -> None:
    """(1 - w) loss + w divergence from the received model, which answers in evaluation mode and stays as it is."""
    result = run(FedHM(), rounds=1, capacities={0.5: 1.0})
    setup = result.federation.setup
    student = copy.deepcopy(setup.network(0.5))
    received = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    teacher = copy.deepcopy(student).eval()
    with torch.no_grad():
        student.fc.weight.add_(0.1 * torch.randn(student.fc.weight.shape, generator=torch.Generator().manual_seed(0)))
    x, y = (part[:8] for part in setup.task.data.of(0))
    ctx = SimpleNamespace(task=setup.task, training=setup.training, labels=y.unique(), down=received)
    expected_buffers = copy.deepcopy(student.train())
    outputs = expected_buffers(x)
    apart = 4 * torch.nn.functional.kl_div(
        (outputs / 2).log_softmax(1), (teacher(x) / 2).softmax(1), reduction="batchmean"
    )
    loss = FedHM(distill=0.3, temperature=2.0).objective(student, (x, y), ctx)  # type: ignore[arg-type]
    torch.testing.assert_close(loss, 0.7 * setup.task.loss(outputs, (x, y)) + 0.3 * apart)
    assert apart > 1e-4
    loss.backward()
    assert student.fc.weight.grad is not None and student.training
    # Batch statistics have seen the batch once: the teacher did not touch them.
    assert torch.equal(student.bn1.running_mean, expected_buffers.bn1.running_mean)
    assert torch.equal(received["bn1.running_mean"], teacher.bn1.running_mean)


@pytest.mark.parametrize("option", [{"distill": 0.5}, {"masked_loss": True}, {"static_norm": True}], ids=str)
def test_options_act(option: dict[str, bool]) -> None:
    plain, changed = run(FedHM(), data=skewed()), run(FedHM(**option), data=skewed())
    assert plain.summary["weights_sha256"] != changed.summary["weights_sha256"]
    assert changed.summary["totals"]["failures"] == 0
    if "distill" in option:  # two passes an example
        assert changed.summary["totals"]["macs"] == 2 * plain.summary["totals"]["macs"]
    if "static_norm" in option:
        assert not any("running" in name for name in changed.server.tensors)
        assert changed.model_at(0.5).bn1.running_mean is not None


@pytest.mark.parametrize("wrong", [{"distill": 1.5}, {"distill": -0.1}, {"temperature": 0.0}, {"tau": 0.0}], ids=str)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
        FedHM(**wrong)


def test_low_rank_clients_are_never_larger() -> None:
    def mlp(width: float = 1.0) -> nn.Module:
        return nn.Sequential(nn.Flatten(), *[nn.Linear(64, 64) for _ in range(3)], nn.Linear(64, 10))

    counts = {c: parameters(FedHM().network(mlp, c)) for c in (1.0, 0.45, 0.25, 0.125)}
    assert counts[1.0] > counts[0.45] > counts[0.25] > counts[0.125]
    gates = {c: parameters(FedHM(rho=0).network(Text, c)) for c in (1.0, 0.5, 0.25)}
    assert gates[1.0] > gates[0.5] > gates[0.25]
    with pytest.raises(ValueError, match=r"no layer that is smaller as factors at capacity 0\.75"):
        FedHM().network(mlp, 0.75)


def test_the_servers_model_takes_part_if_the_strongest_clients_are_missing() -> None:
    """Literal mean of a reply, 3, and the server's 1; of the reply alone if it has the largest capacity."""
    server = {"fc.bias": torch.ones(2)}
    reply = Reply(0, 0.5, 1, {"fc.bias": Piece("fc.bias")}, server, {"fc.bias": torch.full((2,), 3.0)}, {})
    networks = lambda capacity: nn.ModuleDict({"fc": nn.Linear(1, 2)})  # noqa: E731
    for strongest, wanted in ((1.0, 2.0), (0.5, 3.0)):
        mean, _ = folded(FedHM(literal=True, strongest=strongest), server, [reply], networks)
        assert mean["fc.bias"].tolist() == [wanted] * 2
    mean, _ = folded(FedHM(strongest=1.0), server, [reply], networks)
    assert mean["fc.bias"].tolist() == [3.0] * 2
