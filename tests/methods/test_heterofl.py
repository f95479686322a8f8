"""HeteroFL: slices, Scaler, masked loss and static norms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedfactor.methods import HeteroFL, Participant
from fedfactor.protocol.message import BadMessage, joined
from fedfactor.protocol.plan import Piece, Reply, pull
from fedfactor.protocol.validation import check_labels
from fedfactor.task import Task, masked_logits
from tests.helpers.folding import folded
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
    mean, held = folded(method, server, replies)
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
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    loss = Task(Tiny, data()).loss(logits, (logits, torch.tensor([2])), only=torch.tensor([0, 2]))
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


def test_rows_of_the_classifier_are_averaged_over_the_clients_that_have_the_class() -> None:
    """Class 0 is had by both clients, 1 by the first, 2 by nobody."""
    server = {"fc.weight": torch.zeros(3, 1), "fc.bias": torch.zeros(3)}
    plan = {name: Piece(name) for name in server}
    replies = [
        Reply(client, 1.0, 1, plan, server, {"fc.weight": value.reshape(3, 1), "fc.bias": value}, {}, labels=labels)
        for client, value, labels in ((0, torch.full((3,), 1.0), (0, 1)), (1, torch.full((3,), 3.0), (0,)))
    ]
    networks = lambda capacity: nn.ModuleDict({"fc": nn.Linear(1, 3)})  # noqa: E731
    mean, _ = folded(HeteroFL(label_rows=True), server, replies, networks)
    assert mean["fc.bias"].tolist() == mean["fc.weight"].flatten().tolist() == [2.0, 1.0, 0.0]
    mean, _ = folded(HeteroFL(), server, replies, networks)
    assert mean["fc.bias"].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("labels", [None, [], [1, 0], [3, 3], [0, 10], [-1], ["1"], [True]])
def test_labels_that_are_no_classes_are_refused(labels: object) -> None:
    with pytest.raises(BadMessage, match=r"labels must be a list of ascending classes in \[0, 10\)"):
        check_labels(labels, Tiny())


def test_clients_send_their_classes_only_if_asked() -> None:
    sent = [run(HeteroFL(label_rows=asked), data=skewed(), rounds=1) for asked in (False, True)]
    plain, asked = (result.server.tensors["fc.bias"] for result in sent)
    assert not torch.equal(plain, asked)


def test_what_no_client_has_trained_is_silent() -> None:
    """Clients of half the width: the full model gives the answers of the half one, not those of random channels."""
    result = run(HeteroFL(static_norm=False, scaler=False), capacities={0.5: 1.0})
    counts = {"conv1.weight": 4, "conv1.bias": 4, "bn1.weight": 4, "bn1.bias": 4}
    counts |= {"conv2.weight": 8, "bn2.weight": 8, "bn2.bias": 8, "hidden.weight": 16, "hidden.bias": 16}
    assert result.history[-1]["untrained"] == counts
    x = data().train[0][:5]
    torch.testing.assert_close(result.model_at(1.0)(x), result.model_at(0.5)(x))
    again = type(result.server).from_bytes(
        joined(result.server.to_parts()), {"round": result.server.round, "totals": result.server.totals}
    )
    assert {name: mask.tolist() for name, mask in again.untrained.items()} == {
        name: mask.tolist() for name, mask in result.server.untrained.items()
    }
    assert "untrained" not in run(HeteroFL(), capacities={0.5: 0.5, 1.0: 0.5}).history[-1]


def test_a_parameter_without_axes_is_no_row() -> None:
    class Scaled(Tiny):
        def __init__(self, width: float = 1.0) -> None:
            super().__init__(width)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * super().forward(x)

    result = run(HeteroFL(), model=Scaled, capacities={0.5: 1.0})
    assert "scale" not in result.history[-1]["untrained"] and result.server.tensors["scale"] != 1
