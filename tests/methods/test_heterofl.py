"""HeteroFL: slices, Scaler, masked loss and static norms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedfactor.methods import HeteroFL, Participant
from fedfactor.protocol.plan import Reply, holders_mean, pull
from fedfactor.task import Task, masked_logits
from tests.helpers.networks import Text
from tests.helpers.tiny import Tiny, data, run, skewed


def test_a_narrow_client_trains_the_leading_channels_only() -> None:
    """Every client has half the width: what no client holds keeps its first value, the rest moves."""
    result, start = run(HeteroFL(), capacities={0.5: 1.0}), run(HeteroFL(), capacities={0.5: 1.0}, rounds=0)
    new, old = result.server.tensors["conv2.weight"], start.server.tensors["conv2.weight"]
    assert new.shape == (16, 8, 3, 3)
    assert not torch.equal(new[:8, :4], old[:8, :4])
    assert torch.equal(new[8:], old[8:]) and torch.equal(new[:, 4:], old[:, 4:])


def test_two_clients_by_hand() -> None:
    """A narrow and a wide client: held by both, by one, and the mean counts both the same."""
    server = {"fc.weight": torch.zeros(2, 4)}
    method = HeteroFL()
    replies = []
    for width, value in ((2, 1.0), (4, 4.0)):
        network = nn.ModuleDict({"fc": nn.Linear(width, 2, bias=False)})
        plan = method.plan(server, Participant(0, width / 4, 0), network, torch.Generator())
        change = {"fc.weight": torch.full((2, width), value)}
        replies.append(Reply(0, width / 4, 1 if width == 2 else 100, plan, pull(server, plan), change, {}))
    mean, held = holders_mean(server, replies, method.weights(replies))
    assert mean["fc.weight"].tolist() == [[2.5, 2.5, 4.0, 4.0]] * 2
    assert held["fc.weight"].tolist() == [[2, 2, 1, 1]] * 2


def test_masked_logits_push_nothing_down() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    masked = masked_logits(logits, torch.tensor([0, 2]))
    assert masked.tolist() == [[1.0, 0.0, 3.0]]
    nn.functional.cross_entropy(masked, torch.tensor([2])).backward()
    assert logits.grad is not None and logits.grad[0, 1] == 0 and logits.grad[0, 0] > 0


@pytest.mark.parametrize(
    "option", [{"scaler": False}, {"masked_loss": True}, {"scaler": False, "static_norm": False}], ids=str
)
def test_options_act(option: dict[str, bool]) -> None:
    settings = {"data": skewed()}
    assert (
        run(HeteroFL(**option), **settings).summary["weights_sha256"]
        != run(HeteroFL(), **settings).summary["weights_sha256"]
    )


def test_the_scaler_acts_in_training_only() -> None:
    """Trained without a step, a narrow network's answers are those of its weights: nothing is scaled in use."""
    result = run(HeteroFL(), capacities={0.5: 1.0}, epochs=0, rounds=1)
    plain = run(HeteroFL(scaler=False), capacities={0.5: 1.0}, epochs=0, rounds=1)
    assert result.history[-1]["global"] == plain.history[-1]["global"]


def test_the_scaler_with_tracked_statistics_is_refused() -> None:
    """Measured on digits: 0.20 at width 1/4 where 0.82 can be had."""
    with pytest.raises(
        ValueError, match=r"Scaler changes the inputs of 'bn1' .* set static_norm = true, or scaler = fa"
    ):
        run(HeteroFL(static_norm=False))
    group = nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 10))
    HeteroFL(static_norm=False).network(lambda width: group, 1.0)  # nothing tracked, nothing wrong


def test_masked_cross_entropy_by_hand() -> None:
    """Logits (1, 2, 3), class 1 absent: its logit is 0, not minus infinity, so it still takes e^0 of the sum."""
    loss = Task(Tiny, data()).loss(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([2]), only=torch.tensor([0, 2]))
    assert float(loss) == pytest.approx(math.log(math.e + 1 + math.e**3) - 3)


def test_gates_are_sliced_within_each_gate() -> None:
    result = run(HeteroFL(), model=Text, capacities={0.5: 1.0}, rounds=1)
    start = run(HeteroFL(), model=Text, capacities={0.5: 1.0}, rounds=0)
    moved = (result.server.tensors["lstm.weight_hh_l0"] != start.server.tensors["lstm.weight_hh_l0"]).any(1)
    assert moved.view(4, 8).tolist() == [[True] * 4 + [False] * 4] * 4


def test_the_model_is_evaluated_at_every_capacity() -> None:
    result = run(HeteroFL(), capacities={1.0: 0.5, 0.5: 0.5})
    assert list(result.history[-1]["global"]) == ["1", "0.5"]
    assert result.model_at(0.5).fc.in_features == 16
    assert isinstance(result.model, Tiny) and result.model.fc.in_features == 32
