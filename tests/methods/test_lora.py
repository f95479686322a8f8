"""The LoRA family on rounds computed by hand: two clients, a 2 x 2 weight, a loss that is linear in it.

Client k has the loss <G_k, W>, so the gradient of W is G_k, that of B is s G_k A^T and that of A is s B^T G_k, where
s = alpha / r. G_1 and G_2 are 1 in one corner each and 0 elsewhere; the learning rate is 0.5, and a round has one step.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedfactor
from fedfactor import FederatedData, Tune
from fedfactor.methods import (
    FedAvg,
    FedDecomp,
    FedExLora,
    FedHM,
    FedSALora,
    FedSB,
    FedSVD,
    FFALora,
    FlexLora,
    FLoRA,
    HetLora,
    Lora,
    LowRankMethod,
    Method,
    RaFLora,
    RoLora,
)
from fedfactor.nn import factor_weights
from fedfactor.nn.state import fill, tensors_of
from fedfactor.protocol.coding import sections
from fedfactor.protocol.context import Context
from fedfactor.protocol.message import decode
from fedfactor.protocol.settings import Reported
from fedfactor.server.result import Result
from fedfactor.task import Build
from tests.helpers.tiny import Recording, Tiny, run

W0 = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
A = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
GRADIENTS = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]])


class Matrix(nn.Module):
    """One 2 x 2 weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2, bias=False)
        self.fc.weight.data.copy_(W0)

    def forward(self, x: Tensor) -> Tensor:
        """Return something of the right shape: the loss reads the weight."""
        logits: Tensor = self.fc(x[:, :2])
        return logits


def by_hand(method: Method) -> Method:
    """Return the method with the linear loss, and with the rows of `A` as its first A."""

    @dataclass(frozen=True)
    class Hand(type(method)):  # type: ignore[misc]
        def network(self, build: Build, capacity: float) -> nn.Module:
            network: nn.Module = super().network(build, capacity)
            if hasattr(network.fc, "v"):
                network.fc.v.data.copy_(A[: len(network.fc.v)])
            return network

        def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
            weight: Tensor = network.fc.weight
            return (batch[0][0].view(2, 2) * weight).sum()

    return Hand(**{field.name: getattr(method, field.name) for field in fields(method)})


def rounds(method: Method, count: int = 1, alpha: float = 2.0, **settings: Any) -> Result:
    data = FederatedData(
        (GRADIENTS.flatten(1), torch.zeros(2, dtype=torch.long)), [torch.tensor([0]), torch.tensor([1])]
    )
    return fedfactor.simulate(
        Matrix(), data, method=by_hand(method), tune=Tune(alpha=alpha), rounds=count, lr=0.5,
        evaluate_clients="none", **{"capacities": None, **settings},
    )  # fmt: skip


def change(result: Result) -> list[list[float]]:
    """Return the server's change of the weight."""
    found: list[list[float]] = (result.model.fc.weight - W0).tolist()
    return found


def server(result: Result) -> dict[str, Any]:
    return {name.removeprefix("fc."): tensor.tolist() for name, tensor in result.server.tensors.items()}


@pytest.mark.parametrize("method", [Lora(rank=1), LowRankMethod(rank=1)], ids=["lora", "low_rank"])
def test_lora_averages_the_factors_separately(method: Method) -> None:
    """s = 2, A = (1, 2). Round 1: B_1 = (-1, 0), B_2 = (0, -2). Round 2: B_1 = (-1.5, -1), A_1 = (1.5, 2),
    B_2 = (-0.5, -3), A_2 = (1, 3)."""
    assert server(rounds(method)) == {"u": [[-0.5], [-1.0]], "v": [[1.0, 2.0]]}
    two = rounds(method, 2)
    assert server(two) == {"u": [[-1.0], [-2.0]], "v": [[1.25, 2.5]]}
    assert change(two) == [[-2.5, -5.0], [-5.0, -10.0]]
    mean_of_changes = [[-2.75, -4.5], [-4.5, -11.0]]
    assert change(two) != mean_of_changes, "the error that other methods avoid"


def test_ffa_lora_trains_b_only() -> None:
    two = rounds(FFALora(rank=1), 2)
    assert server(two) == {"u": [[-1.0], [-2.0]]}
    assert change(two) == [[-2.0, -4.0], [-4.0, -8.0]], "the mean of the clients' changes"


def test_rolora_trains_b_and_a_in_turn() -> None:
    engine = Recording()
    two = rounds(RoLora(rank=1), 2, engine=engine)
    assert server(two) == {"u": [[-0.5], [-1.0]], "v": [[1.25, 2.5]]}
    assert change(two) == [[-1.25, -2.5], [-2.5, -5.0]]
    sent = {(decode(m).fields["round"], *sections(decode(m).tensors)["model"]) for m in engine.up}
    assert sent == {(0, "fc.u"), (1, "fc.v")}, "what is not trained is not uploaded"
    assert {(*sections(decode(m).tensors)["model"],) for m in engine.down} == {("fc.u", "fc.v")}


def test_fedsa_lora_shares_a_and_keeps_b() -> None:
    """Round 1: B_1 = (-1, 0), B_2 = (0, -2). Round 2: A_1 = (2, 2), A_2 = (1, 4)."""
    engine = Recording()
    two = rounds(FedSALora(rank=1), 2, engine=engine)
    assert server(two) == {"v": [[1.5, 3.0]]}
    kept = [sections(decode(two.federation.store.read("client", k)).tensors)["kept"] for k in range(2)]  # type: ignore[arg-type]
    assert [state["fc.u"].tolist() for state in kept] == [[[-2.0], [0.0]], [[0.0], [-4.0]]]
    assert {name for m in engine.up + engine.down for name in decode(m).tensors} == {"model/fc.v"}
    assert (two.client_model(0).fc.weight - W0).tolist() == [[-6.0, -12.0], [0.0, 0.0]]


RANKS = {"capacities": Reported({1.0: 0.5, 0.5: 0.5}, given={0: 1.0, 1: 0.5})}


def test_raflora_averages_each_component_over_its_holders() -> None:
    """s = 1. The first client has two components, B_1 = ((-0.5, -1.5), (0, 0)), the second one has one, (0, -1)."""
    assert server(rounds(RaFLora(rank=2), **RANKS))["u"] == [[-0.25, -1.5], [-0.5, 0.0]]


def test_hetlora_weights_by_the_norm_of_the_change_and_pads_with_zeros() -> None:
    """B_1 A_1 = ((-5, -7), (0, 0)) and B_2 A_2 = ((0, 0), (-1, -2))."""
    found = server(rounds(HetLora(rank=2), **RANKS))["u"]
    first = math.sqrt(74) / (math.sqrt(74) + math.sqrt(5))
    wanted = [[-0.5 * first, -1.5 * first], [-(1 - first), 0.0]]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted))


@pytest.mark.parametrize("method", [FlexLora(rank=2), FedHM(rho=0)], ids=["flexlora", "fedhm"])
def test_flexlora_averages_the_products(method: Method) -> None:
    if isinstance(method, FlexLora):
        result = rounds(method, **RANKS)
        torch.testing.assert_close(
            torch.tensor(change(result)), torch.tensor([[-2.5, -3.5], [-0.5, -1.0]]), rtol=1e-6, atol=1e-6
        )
        v = result.server.tensors["fc.v"]
        torch.testing.assert_close(v @ v.T, torch.eye(2))
    else:  # all clients are dense
        assert change(rounds(method)) == [[-0.25, 0.0], [0.0, -0.25]] == change(rounds(FedAvg()))


def test_fedsvd_decomposes_the_mean_of_b_times_a() -> None:
    """mean(B) A = (-0.5, -1)^T (1, 2), whose only singular vector on the right is (1, 2) / sqrt(5)."""
    engine = Recording()
    result = rounds(FedSVD(rank=1), engine=engine)
    torch.testing.assert_close(torch.tensor(change(result)), torch.tensor([[-1.0, -2.0], [-2.0, -4.0]]))
    a = result.server.tensors["fc.v"]
    torch.testing.assert_close(a * a[0, 0].sign(), torch.tensor([[1.0, 2.0]]) / math.sqrt(5))
    assert {name for m in engine.up for name in decode(m).tensors} == {"model/fc.u"}


def test_fed_sb_trains_a_core_between_the_singular_vectors_of_the_weight() -> None:
    """W0 = diag(2, 1): the bases are the axes, and the gradient of R is G_k, or its first corner for rank 1."""
    assert server(rounds(FedSB(rank=2))) == {"r": [[-0.25, 0.0], [0.0, -0.25]]}
    one = rounds(FedSB(rank=1))
    assert server(one) == {"r": [[-0.25]]} and change(one) == [[-0.25, 0.0], [0.0, 0.0]]


def test_fedex_lora_adds_the_error_of_the_mean_to_the_base() -> None:
    """The factors are those of LoRA; what they lack is mean(B A) - mean(B) mean(A), times s = 2."""
    one, two = rounds(FedExLora(rank=1)), rounds(FedExLora(rank=1), 2)
    assert one.server.moves.total == {}, "A did not change, so the mean of round 1 is exact"
    assert server(two) == {"u": [[-1.0], [-2.0]], "v": [[1.25, 2.5]]}
    assert two.server.moves.total["fc.w"].tolist() == [[-0.25, 0.5], [0.5, -1.0]]
    assert change(two) == [[-2.75, -4.5], [-4.5, -11.0]], "the mean of the clients' changes"


def test_flora_merges_the_stack_into_the_base_and_starts_anew() -> None:
    """s = 1, B_1 A_1 = ((-5, -7), (0, 0)) of rank 2, and B_2 A_2 = ((0, 0), (-1, -2)) of rank 1."""
    result = rounds(FLoRA(rank=2), **RANKS)
    assert result.server.moves.total["fc.w"].tolist() == [[-2.5, -3.5], [-0.5, -1.0]] == change(result)
    found = server(result)
    assert found["u"] == [[0.0, 0.0], [0.0, 0.0]] and found["v"] != A.tolist()
    assert server(rounds(FLoRA(rank=2), **RANKS)) == found, "the next A depends on the run alone"
    assert server(rounds(FLoRA(rank=2), 2, **RANKS))["v"] != found["v"], "it is another one in each round"


# The server's change is the mean of the clients' changes.


def gap(method: Method, targets: tuple[str, ...] = ("conv2", "hidden"), **settings: Any) -> float:
    """Return how far the server's change of a small network is from the mean of its clients' changes, relatively."""
    torch.manual_seed(0)
    engine, model, tune = Recording(), Tiny(), Tune(targets, train=("fc",))
    settings |= {"model": model, "tune": tune, "lr": 0.5, "dtype": "float64"}
    result = run(method, engine=engine, rounds=3, **settings)
    setup = result.federation.setup
    jobs = {(m.fields["round"], m.fields["client"]): m for m in map(decode, engine.down) if m.kind == "train"}
    last = [m for m in map(decode, engine.up) if m.kind == "trained" and m.fields["round"] == 2]
    means: dict[str, Tensor] = {}
    for reply in last:
        network = copy.deepcopy(setup.at(2).network(reply.fields["capacity"]))
        down = sections(jobs[2, reply.fields["client"]].tensors)["model"]
        changes: list[dict[str, Tensor]] = []
        for tensors in (down, {**down, **sections(reply.tensors)["model"]}):
            fill(network, tensors)
            changes.append({name: layer.change().detach() for name, layer in factor_weights(network).items()})
        for name, before in changes[0].items():
            means[name] = means.get(name, 0) + (changes[1][name] - before) / len(last)
    before = run(method, rounds=2, **settings).model
    after, start = tensors_of(result.model), tensors_of(before)
    moved = {name: after[f"{name}.weight"] - start[f"{name}.weight"] for name in targets}
    return max(float((moved[name] - means[name]).norm() / means[name].norm()) for name in targets)


@pytest.mark.parametrize(
    "method",
    [
        FFALora(rank=4), RoLora(rank=4), FlexLora(rank=16), FedSVD(rank=4), FedSB(rank=4), FedExLora(rank=4),
        FLoRA(rank=16), FedAvg(),
    ],
    ids=lambda method: method.name,
)  # fmt: skip
def test_exact_means(method: Method) -> None:
    if isinstance(method, (FlexLora, FLoRA)):  # the rank of this layer is 16
        assert gap(method, ("conv2",), capacities={1.0: 0.5, 0.5: 0.5}) < 1e-6
    else:
        assert gap(method, capacities=None) < 1e-6


def test_the_mean_of_lora_is_not_exact() -> None:
    assert gap(Lora(rank=4), capacities=None) > 1e-3


def test_lora_is_low_rank_under_another_name() -> None:
    settings: dict[str, Any] = {"model": Tiny(), "tune": Tune(train=("fc",)), "capacities": None}
    one, two = run(Lora(rank=2), **settings), run(LowRankMethod(rank=2), **settings)
    assert one.summary["weights_sha256"] == two.summary["weights_sha256"]
    assert one.server.tensors["conv2.u"].shape == (16, 2, 1, 1) and one.server.tensors["conv2.v"].shape == (2, 8, 3, 3)


def test_ranks_follow_the_capacities_and_the_scale_does_not() -> None:
    settings: dict[str, Any] = {"model": Tiny(), "tune": Tune(targets=("hidden",), alpha=8.0), "rounds": 0}
    for method in (RaFLora(rank=4), HetLora(rank=4), FlexLora(rank=4), FLoRA(rank=4)):
        setup = run(method, **settings).federation.setup
        layers = [factor_weights(setup.network(level))["hidden"] for level in (1.0, 0.5)]
        assert [len(layer.factors["v"]) for layer in layers] == [4, 2]
        assert [layer.scale for layer in layers] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (lambda: FFALora(start="given"), "ffa_lora draws A at random"),
        (lambda: FedSB(start="given"), "fed_sb computes its bases"),
        (lambda: RoLora(trained="w"), "trained must be"),  # type: ignore[arg-type]
        (lambda: RaFLora(rank=0), "rank must be a whole number, at least 1"),
    ],
)
def test_settings_are_checked(method: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        method()


@pytest.mark.parametrize("method", [Lora(), FLoRA(), FedSB(), FedDecomp(rank=2), FedHM(rank=2)], ids=lambda m: m.name)
def test_methods_without_a_layer_to_change_are_refused(method: Method) -> None:
    """Layers that are trained whole would lose their weights if they were factorised."""
    for tune in (Tune(("none",), train=("fc",)), Tune(train=("*",))):
        with pytest.raises(ValueError, match=r"tune.targets gives none a change; fedavg trains what tune.train lists"):
            run(method, model=Tiny(), tune=tune, rounds=1)


def test_feddecomp_leaves_the_changes_of_dense_layers_dense() -> None:
    method = FedDecomp(rank=2, dense=("hidden",))
    result = run(method, model=Tiny(), tune=Tune(("conv2", "hidden")), rounds=1, epochs=2, capacities=None)
    assert result.server.tensors.keys() == {"conv2.u", "conv2.v", "hidden.w"}
    assert result.history[1]["observed"]["tau_change"] > 0


def test_a_rank_above_that_of_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 'fc' \(2 x 2\): rank must lie in \[1, 2\], got 3"):
        rounds(Lora(rank=3))
