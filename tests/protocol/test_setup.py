"""The setup that server and clients share: networks, private tensors and what codecs may change."""

from __future__ import annotations

from typing import Any

import torch

from fedfactor.protocol.message import Message, encode
from fedfactor.protocol.settings import Training
from fedfactor.protocol.setup import Setup, kept_of
from fedfactor.registry import create
from tests.helpers.tiny import Tiny, run, task


def test_frozen_parameters_stay_as_they_are() -> None:
    model = Tiny()
    model.conv1.weight.requires_grad_(False)
    result = run(model=model, capacities={1.0: 1.0}, optimizer="scaffold", codec="fedpaq")
    assert "conv1.weight" not in result.server.tensors
    assert torch.equal(result.model.conv1.weight, model.conv1.weight)
    assert not result.model.conv1.weight.requires_grad and result.model.conv2.weight.requires_grad


def setup(method: str = "fedper", seed: int = 5, **options: Any) -> Setup:
    parts = create("methods", method, **options), create("optimizers", "fedavg"), create("codecs", "float32")
    made = Setup(task(), *parts, Training(seed=seed))
    made.bind([1.0, 0.5])
    return made


def test_a_network_is_built_once_per_capacity_from_the_seed_alone() -> None:
    one, torch_state = setup("heterofl"), torch.get_rng_state()
    assert one.network(0.5) is one.network(0.5) is not one.network(1.0)
    assert one.network(0.5).fc.in_features == 16
    assert torch.equal(torch.get_rng_state(), torch_state), "the caller's random numbers do not change"
    torch.manual_seed(1)
    again, other = setup("heterofl").network(0.5), setup("heterofl", seed=6).network(0.5)
    assert torch.equal(again.fc.weight, one.network(0.5).fc.weight) and not torch.equal(
        again.fc.weight, other.fc.weight
    )


def test_private_tensors_start_equal_and_stay_when_the_network_is_overwritten() -> None:
    one = setup()
    first = {name: tensor.clone() for name, tensor in one.kept(1.0).items()}
    assert first.keys() == {"fc.weight", "fc.bias"} and not one.has_global_model
    with torch.no_grad():
        one.network(1.0).fc.weight.zero_()
    assert torch.equal(one.kept(1.0)["fc.weight"], first["fc.weight"])
    assert torch.equal(setup().kept(1.0)["fc.weight"], first["fc.weight"])
    assert "bn1.running_mean" not in one.trained(1.0) and "bn1.weight" in one.trained(1.0)


def test_states_of_another_form_of_the_method_are_dropped() -> None:
    """Pufferfish has factors from round 2 on; what a client kept of the dense form fits no factor."""
    one = setup("pufferfish", warmup=2)
    assert one.at(0) is one.at(1) is not one.at(2) and one.at(2) is one.at(9)
    state = encode(Message("state", {"round": 1}, {"codec/fc.weight": torch.ones(1)}))
    assert kept_of(one, state, 1)["codec"]["fc.weight"].tolist() == [1.0]
    assert kept_of(one, state, 2) == kept_of(one, None, 1) == {}
