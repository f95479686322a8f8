"""FedRolex: the window of channels."""

from __future__ import annotations

import torch
from torch import nn

from fedfactor.methods import FedRolex, Participant
from fedfactor.protocol.plan import pull
from tests.helpers.networks import Text
from tests.helpers.tiny import run


def network(width: int) -> nn.Module:
    """A convolution, and a linear layer that reads its flattened maps of two positions each."""
    conv, fc = nn.Conv1d(1, width, 1, bias=False), nn.Linear(2 * width, 3, bias=False)
    return nn.ModuleDict({"conv": conv, "fc": fc})


def test_the_window_advances_by_one_channel_and_wraps_around() -> None:
    server = {"conv.weight": torch.arange(4.0).reshape(4, 1, 1), "fc.weight": torch.arange(8.0).expand(3, 8).clone()}
    for round, channels in ((0, [0, 1]), (3, [3, 0]), (6, [2, 3])):
        plan = FedRolex().plan(server, Participant(0, 0.5, round), network(2), torch.Generator())
        held = pull(server, plan)
        assert held["conv.weight"].flatten().tolist() == channels
        assert held["fc.weight"][0].tolist() == [2 * c + position for c in channels for position in (0, 1)]
    used = FedRolex().plan(server, Participant(-1, 0.5, 3), network(2), None)
    assert pull(server, used)["conv.weight"].flatten().tolist() == [0, 1]


def test_gates_advance_within_their_block() -> None:
    full, half = Text(width=1.0), Text(width=0.5)
    server = {name: tensor.detach() for name, tensor in full.state_dict().items()}
    plan = FedRolex().plan(server, Participant(0, 0.5, 6), half, torch.Generator())
    units = [6, 7, 0, 1]  # of eight, in each of four gates
    rows = [8 * gate + unit for gate in range(4) for unit in units]
    assert plan["lstm.weight_hh_l0"].index[0].tolist() == plan["lstm.bias_ih_l0"].index[0].tolist() == rows  # type: ignore[union-attr]
    assert plan["lstm.weight_hh_l0"].index[1].tolist() == units  # type: ignore[union-attr]


def test_all_channels_are_trained_although_no_client_has_them_all() -> None:
    result = run(FedRolex(), capacities={0.5: 1.0}, rounds=17, evaluate_every=4)
    left = {name: count for name, count in result.history[4]["untrained"].items() if "weight" in name}
    assert left == {"conv1.weight": 1, "bn1.weight": 1, "conv2.weight": 5, "bn2.weight": 5, "hidden.weight": 13}
    assert "untrained" in result.history[16] and "untrained" not in result.history[-1]
    assert [*result.history[-1]["global"]] == ["1", "0.5"]
