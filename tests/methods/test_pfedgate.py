"""pFedGate: cuts, choice and gradients by hand; what stays, what is shared, what the budget allows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedfactor.data.clients import FederatedData
from fedfactor.methods import PFedGate
from fedfactor.methods.gated import Cut, Gated, SwitchNorm, chosen, cut
from fedfactor.protocol.message import decode
from fedfactor.task import Task
from tests.helpers.tiny import Recording, Tiny, run


class Ten(nn.Module):
    """Ten weights in one tensor that is no linear layer's; the output is their sum times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(10))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w.sum()


def test_a_tensor_of_ten_by_hand() -> None:
    """s = .6: s_min = .2, values 9 3 7 2 6, room round(8 (.4)) = 3: pieces 0 and 2 of two weights each are kept."""
    gated = Gated(Ten(), (1,), pieces=5, budget=0.6)
    scores = torch.tensor([0.9, 0.31, 0.72, 0.05, 0.64], requires_grad=True)
    assert gated.least == 0.2
    factors = gated.factors(scores)
    assert factors.tolist() == pytest.approx([0.9, 0.0, 0.72, 0.0, 0.0])
    assert gated.parameters_for(scores)["w"].tolist() == pytest.approx([0.9] * 2 + [0.0] * 2 + [0.72] * 2 + [0.0] * 4)
    factors.sum().backward()  # d(m g) = g + m where kept, the mask m being 1 with the score's gradient
    assert scores.grad is not None and scores.grad.tolist() == pytest.approx([1.9, 0.0, 1.72, 0.0, 0.0])


def test_with_the_whole_budget_nothing_is_dropped_but_all_is_scaled() -> None:
    gated = Gated(Ten(), (1,), pieces=5, budget=1.0)
    assert gated.factors(torch.tensor([0.9, 0.31, 0.72, 0.05, 0.64])).tolist() == pytest.approx(
        [0.9, 0.31, 0.72, 0.2, 0.64]
    )


def test_cuts() -> None:
    cuts = {one.name: (one.sizes(), one.linear) for one in cut(Tiny(), 5)}
    assert cuts["conv1.bias"] == ([2, 2, 2, 2], False)  # eight entries: four pieces of two
    assert cuts["fc.bias"] == ([2] * 5, True)
    assert cuts["conv1.weight"] == ([15, 15, 15, 15, 12], False)
    assert [one.sizes() for one in cut(nn.Linear(1, 3, bias=False), 5)] == [[1, 1, 1]]
    total = sum(parameter.numel() for parameter in Tiny().parameters())
    assert sum(sum(sizes) for sizes, _ in cuts.values()) == total


def test_linear_layers_have_a_budget_of_their_own() -> None:
    """Two tensors of three pieces of ten: each kind has room for one piece, whatever the other kind scores."""
    cuts = [Cut("conv", 30, 10, 3, False), Cut("fc", 30, 10, 3, True)]
    kept = chosen([0.1, 0.2, 0.3, 0.9, 0.8, 0.9], cuts, budget=0.8, least=0.3)
    assert kept == [True, False, True, True, False, True]


def test_the_kept_share_stays_within_the_budget() -> None:
    gated = Gated(Tiny(), (1, 8, 8), pieces=5, budget=0.5)
    torch.manual_seed(0)
    sizes = torch.tensor([size for one in gated.cuts for size in one.sizes()])
    for _ in range(20):
        kept = gated.factors(torch.rand(len(sizes))) > 0
        assert 0.2 < float(sizes[kept].sum() / sizes.sum()) <= 0.5


def test_logits_are_the_models_own_negative_ones_included() -> None:
    """With all scores at one the gated model is the model."""
    torch.manual_seed(0)
    model = Tiny().eval()
    gated = Gated(model, (1, 8, 8), pieces=5, budget=1.0).eval()
    with torch.no_grad():
        gated.gate.scale.bias.fill_(100.0)
    x = torch.randn(6, 1, 8, 8)
    torch.testing.assert_close(gated(x), model(x))
    assert (gated(x) < 0).any()


def test_switch_norm_is_the_mix_of_three() -> None:
    torch.manual_seed(0)
    x, norm = 3 + 2 * torch.randn(4, 3, 5, 5), SwitchNorm(3)
    pure = {0: nn.InstanceNorm2d(3), 1: nn.GroupNorm(1, 3), 2: nn.BatchNorm2d(3)}
    for kind, reference in pure.items():
        with torch.no_grad():
            norm.mean_mix.fill_(-1e4)[kind] = 0.0
            norm.var_mix.fill_(-1e4)[kind] = 0.0
        torch.testing.assert_close(norm.train()(x), reference.train()(x), rtol=1e-4, atol=1e-4)
    for _ in range(200):
        norm.train()(x)
    torch.testing.assert_close(norm.eval()(x), pure[2].train()(x), rtol=1e-3, atol=1e-3)  # statistics it has learnt


def test_switch_norm_of_pictures_of_one_colour_is_finite() -> None:
    norm = SwitchNorm(1)
    for colour in torch.linspace(100, 255, 50):
        x = colour.expand(3, 1, 7, 7)
        assert norm.train()(x).isfinite().all() and norm.running_var.min() >= 0
    assert norm.eval()(x).isfinite().all()


def test_the_gate_stays_on_the_client_and_trains_and_the_model_is_averaged() -> None:
    engine = Recording()
    result = run("pfedgate", engine=engine, cohort=6)
    sent = {name for message in engine.up for name in decode(message).tensors}
    assert sent == {f"model/model.{name}" for name in Tiny().state_dict()}
    start = result.federation.setup.kept(1.0)
    states = [decode(result.federation.store.read("client", client) or b"").tensors for client in (0, 1)]
    for name in ("gate.linear.weight", "gate.norm.mean_mix"):
        assert not torch.equal(states[0][f"kept/{name}"], states[1][f"kept/{name}"])
        assert not torch.equal(states[0][f"kept/{name}"], start[name])
    first = run("pfedgate", rounds=0).server.tensors
    assert not torch.equal(first["model.fc.weight"], result.server.tensors["model.fc.weight"])


def test_options_act_and_capacities_scale_the_budget() -> None:
    options = [{}, {"budget": 1.0}, {"budget": 0.3}, {"pieces": 3}, {"gate_pace": 0.1}]
    hashes = {run(PFedGate(**option)).summary["private_sha256"] for option in options}  # type: ignore[arg-type]
    assert len(hashes) == len(options)
    setup = run(PFedGate(budget=0.8), rounds=0).federation.setup
    assert (setup.network(1.0).budget, setup.network(0.5).budget) == (0.8, 0.4)


def test_a_gate_at_rest_does_not_move() -> None:
    result = run(PFedGate(gate_pace=0.0), rounds=1, cohort=6)
    start, state = result.federation.setup.kept(1.0), decode(result.federation.store.read("client", 0) or b"").tensors
    weights = [name for name in start if not any(word in name for word in ("running", "tracked"))]
    assert all(torch.equal(state[f"kept/{name}"], start[name]) for name in weights)


def test_what_makes_no_sense_is_refused() -> None:
    tokens = FederatedData.without_examples(1, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="one tensor of real numbers"):
        PFedGate().bind(Task(nn.Identity(), tokens), [1.0])
    with pytest.raises(ValueError, match=r"budget must lie in \(0, 1\]"):
        PFedGate(budget=0.0)
    with pytest.raises(ValueError, match="pieces must be at least 1"):
        PFedGate(pieces=0)
