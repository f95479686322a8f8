"""Methods with networks of several widths: parameters, costs and gates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedfactor import cost
from fedfactor.methods import (
    FLANC,
    FedHM,
    FjORD,
    HeteroFL,
    Method,
    OrigDrop,
    OrthDrop,
    Participant,
    PriSM,
    Pufferfish,
    Slim,
)
from fedfactor.models.transformer import transformer
from fedfactor.nn import factor_weights
from fedfactor.nn.norms import axis_blocks, pooled
from fedfactor.protocol.plan import slice_plan
from fedfactor.tables import fedhm as printed
from fedfactor.tables.counting import network, parameters
from tests.helpers.measured import Measured
from tests.helpers.tiny import Tiny, run


def methods(width: float) -> list[Method]:
    return [HeteroFL(), OrigDrop(), FjORD(), Slim(width=width)]


@pytest.mark.parametrize("dataset", printed.SLIM)
def test_sub_models_have_the_parameters_of_the_tables(dataset: str) -> None:
    base, classes, side = printed.BASES[dataset]
    for width in printed.SLIM[dataset]:
        counted = parameters(printed.Network(base, classes, side, width=width).model)
        for method in methods(width):
            build = lambda w: network(base, classes=classes, width=w, rounding="nearest")  # noqa: E731
            assert parameters(method.network(build, width)) == counted, method


@pytest.mark.parametrize(
    ("name", "counts"),
    [("resnet18", (701_466, 2_797_610, 6_288_442, 11_173_962)), ("cnn4", (43_978, 105_738, 185_930, 284_554))],
)
def test_p_width_networks_have_the_parameters_of_flancs_table(name: str, counts: tuple[int, ...]) -> None:
    """0.7, 2.8, 6.3 and 11.1 M (cut off, not rounded) for CIFAR-10; 43 (the same), 106, 186 and 285 K."""
    for width, count in zip((0.25, 0.5, 0.75, 1.0), counts, strict=True):
        for method in methods(width):
            assert parameters(method.network(lambda w: network(name, width=w), width)) == count, method


@pytest.mark.parametrize("capacity", [1.0, 0.5])
@pytest.mark.parametrize("method", methods(0.5), ids=lambda m: m.name)
def test_a_live_client_holds_no_more_than_its_cost_row_says(method: Method, capacity: float) -> None:
    """The network that really trains, in a step of its own objective, against the row of the plain network."""
    setup = run(method, rounds=0, capacities={1.0: 0.5, 0.5: 0.5}).federation.setup
    live = setup.network(capacity).train()
    x, y = (part[:10].clone() for part in setup.task.data.of(0))
    row = cost.measure(Tiny(0.5 if isinstance(method, Slim) else capacity).train(), x)
    assert sum(p.numel() for p in live.parameters()) == row.parameters == cost.measure(live, x).parameters
    ctx = SimpleNamespace(task=setup.task, capacity=capacity, labels=y.unique())
    for seed in range(4):  # FjORD draws both widths
        torch.manual_seed(seed)
        with Measured(live) as step:
            loss = setup.method.objective(live, (x, y), ctx)  # type: ignore[arg-type]
        step.trace.save(loss)
        # The loss itself keeps a few numbers an example, which the row of the network does not have; the Scaler keeps
        # nothing, since it multiplies by a constant.
        assert step.trace.saved_bytes <= row.activation_bytes + 800
        assert 0 < step.macs <= row.macs
        loss.backward()


# By hand: conv1, bn1, conv2's u and v, bn2, hidden's u, v and bias, fc.
PRISM = 4 * 9 + 4 + 2 * 4 + 8 * 8 + 8 * 4 * 9 + 2 * 8 + 16 * 16 + 16 * 128 + 16 + 16 * 10 + 10
FEDHM = 8 * 9 + 8 + 2 * 8 + 8 * (16 * 3) + 8 * (8 * 3) + 2 * 16 + 16 * 32 + 16 * 256 + 32 + 32 * 10 + 10
COUNTED = {("prism", 0.5): PRISM, ("orthdrop", 0.5): PRISM, ("fedhm", 0.5): FEDHM}


@pytest.mark.parametrize("capacity", [1.0, 0.5])
@pytest.mark.parametrize("method", [FLANC(), PriSM(), OrthDrop(), FedHM()], ids=lambda m: m.name)
def test_a_live_factorised_client_holds_no_more_than_its_cost_row_says(method: Method, capacity: float) -> None:
    setup = run(method, rounds=1, capacities={1.0: 0.5, 0.5: 0.5}).federation.setup
    live = setup.network(capacity).train()  # as the run has left it
    x, y = (part[:10].clone() for part in setup.task.data.of(0))
    row = cost.measure(setup.method.network(setup.task.build, capacity).train(), x)
    assert sum(p.numel() for p in live.parameters()) == row.parameters
    ctx = SimpleNamespace(task=setup.task, capacity=capacity, labels=y.unique(), training=setup.training)
    with Measured(live) as step:
        loss = setup.method.objective(live, (x, y), ctx)  # type: ignore[arg-type]
    # FLANC's penalty multiplies every basis by itself and keeps that product, and its difference from the identity.
    bases = [w.factors["v"].flatten(1) for w in factor_weights(live).values()] if isinstance(method, FLANC) else []
    assert step.trace.saved_bytes <= row.activation_bytes + 800 + sum(4 * len(v) ** 2 * 2 for v in bases)
    assert 0 < step.macs <= row.macs + sum(len(v) * v.numel() for v in bases)
    if (method.name, capacity) in COUNTED:
        assert row.parameters == COUNTED[method.name, capacity]
    if capacity < 1:
        full = cost.measure(setup.method.network(setup.task.build, 1.0).train(), x)
        assert row.parameters < full.parameters and row.macs < full.macs
    loss.backward()


class Cell(nn.Module):
    def __init__(self, width: float = 1.0, both: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, int(8 * width), bidirectional=True) if both else nn.LSTMCell(8, int(8 * width))
        self.fc = nn.Linear(int(8 * width) * (1 + both), 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.lstm(x[:, 0, 0])[0])


def test_cells_are_cut_within_their_gates_and_two_directions_not_at_all() -> None:
    result, start = (run(HeteroFL(), model=Cell, capacities={0.5: 1.0}, rounds=n) for n in (1, 0))
    moved = (result.server.tensors["lstm.weight_ih"] != start.server.tensors["lstm.weight_ih"]).any(1).view(4, 8)
    assert moved[[0, 2, 3]].tolist() == [[True] * 4 + [False] * 4] * 3  # nothing is there to forget
    with pytest.raises(ValueError, match="bidirectional layer cannot be cut to a width"):
        run(HeteroFL(), model=lambda width: Cell(width, both=True), capacities={0.5: 1.0})


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        (FLANC, {"strength": -1}, "strength must be a number, at least 0"),
        (FLANC, {"bases": {"conv2": (2,)}}, "bases of 'conv2' must be two numbers"),
        (FLANC, {"bases": {"conv2": (2, 0)}}, "R2 of 'conv2' in bases must be a whole number, at least 1"),
        (PriSM, {"kappa": -1}, "kappa must be a number, at least 0"),
        (PriSM, {"outputs": 1.5}, "outputs must be a whole number"),
        (FedHM, {"rho": 1.5}, "rho must be a whole number"),
        (FedHM, {"rank": -3}, "rank must be a whole number"),
        (Pufferfish, {"first": -1}, "first must be a whole number"),
        (Pufferfish, {"ratio": 0}, "ratio must lie in"),
    ],
)
def test_settings_out_of_range_are_named(method: type[Method], settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        method(**settings)  # type: ignore[arg-type]


def test_statistics_of_parts_are_those_of_all_together() -> None:
    """Three clients with other means: the variance between them is part of the whole."""
    parts = [torch.randn(n, 3, dtype=torch.float64) + shift for n, shift in ((5, 0.0), (20, 3.0), (9, -2.0))]
    whole = torch.cat(parts)
    found = pooled((len(part), torch.stack([part.mean(0), part.var(0, correction=0)])) for part in parts)
    torch.testing.assert_close(found, torch.stack([whole.mean(0), whole.var(0, correction=0)]))


@pytest.mark.parametrize("method", [FLANC, FjORD, HeteroFL, FedHM])
def test_a_masked_loss_pushes_no_class_down_that_a_client_lacks(method: type[Method]) -> None:
    """Gradients of the classifier's bias with and without the mask, on a batch of class 3 alone."""
    gradients = {}
    for masked in (False, True):
        setup = run(method(masked_loss=masked), rounds=0, capacities={1.0: 0.5, 0.5: 0.5}).federation.setup
        network = setup.network(1.0).train()
        x, y = setup.task.data.train[0][:4], torch.full((4,), 3)
        training = SimpleNamespace(weight_decay=0.0)
        ctx = SimpleNamespace(task=setup.task, capacity=1.0, labels=y.unique(), training=training, down={})
        setup.method.objective(network, (x, y), ctx).backward()  # type: ignore[arg-type, no-untyped-call]
        bias = next(p for name, p in network.named_parameters() if name.endswith("fc.bias"))
        gradients[masked] = bias.grad[torch.arange(10) != 3]
    assert gradients[False].abs().min() > 0 and gradients[True].abs().max() == 0


def test_narrow_heads_are_parts_of_the_same_heads() -> None:
    """Four heads of four features: a half-width network has the first two features of each head, in q, k and v."""
    full, half = (transformer(dim=16 * w // 2, heads=4, hidden=8, vocabulary=9, layers=1) for w in (2, 1))
    view = {name: tensor.detach() for name, tensor in full.state_dict().items()}
    plan = HeteroFL().plan(view, Participant(0, 0.5, 0), half, torch.Generator())
    of_heads = [4 * head + feature for head in range(4) for feature in (0, 1)]
    attention = "encoder.layers.0.self_attn."
    rows = [16 * part + one for part in range(3) for one in of_heads]
    assert plan[attention + "in_proj_weight"].index[0].tolist() == rows  # type: ignore[union-attr]
    assert plan[attention + "in_proj_weight"].index[1] == 8
    assert plan[attention + "out_proj.weight"].index[0] == 8
    assert plan[attention + "out_proj.weight"].index[1].tolist() == of_heads  # type: ignore[union-attr]


def test_narrow_attention_computes_with_the_slices() -> None:
    """A full network whose other features are zero gives the answers of the narrow one."""
    torch.manual_seed(0)
    full, half = nn.MultiheadAttention(16, 4, bias=False), nn.MultiheadAttention(8, 4, bias=False)
    blocks, own = axis_blocks(half), {name: tensor.detach() for name, tensor in half.state_dict().items()}
    server = {name: torch.zeros_like(tensor) for name, tensor in full.state_dict().items()}
    for name, piece in slice_plan(server, own, blocks).items():
        piece.add(server[name], own[name])
    # Scores are divided by the square root of a head's features, 4 instead of 2.
    server["in_proj_weight"][:16] *= 2**0.5
    full.load_state_dict(server)
    x = torch.randn(5, 2, 8)
    wide = torch.cat([x, torch.zeros(5, 2, 8)], 2)
    torch.testing.assert_close(full(wide, wide, wide)[0][..., :8], half(x, x, x)[0])
