"""The local optimizer against torch's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fedfactor.client.descent import descent, packed, state_tensors, unpacked
from fedfactor.protocol.local_optimizer import LocalOptimizer
from fedfactor.protocol.method import ParameterGroup
from fedfactor.protocol.settings import Training
from fedfactor.protocol.setup import Setup
from fedfactor.registry import create
from fedfactor.task import Task
from tests.helpers.tiny import data, run


def setup(training: Training) -> Setup:
    fedavg = create("methods", "fedavg"), create("optimizers", "fedavg"), create("codecs", "float32")
    return Setup(Task(nn.Identity, data()), *fedavg, training)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_steps_are_those_of_torchs_fused_sgd_to_the_bit(momentum: float, weight_decay: float) -> None:
    """One parameter has no gradient in the first two steps: its momentum starts later than the others'."""
    rng = torch.Generator().manual_seed(0)
    start = {name: torch.randn(40, 30, generator=rng) for name in ("a", "b", "late")}
    ours = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    theirs = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    training = Training(momentum=momentum, weight_decay=weight_decay)
    sgd = descent(training, [ParameterGroup(["a", "b", "late"])], ours, {})
    # An optimizer each, since torch's fused one does not take parameters whose momentum starts at different times.
    plain = [
        torch.optim.SGD([p], lr=0.1, momentum=momentum, weight_decay=weight_decay, fused=True) for p in theirs.values()
    ]
    for step in range(5):
        for name in start:
            gradient = None if name == "late" and step < 2 else torch.randn(40, 30, generator=rng)
            ours[name].grad, theirs[name].grad = gradient, None if gradient is None else gradient.clone()
        sgd.step(0.1)
        for optimizer in plain:
            optimizer.step()
        assert all(torch.equal(ours[name], theirs[name]) for name in start)
    assert not torch.equal(ours["late"], start["late"])


CHOICES: dict[str, tuple[Any, type[torch.optim.Optimizer], dict[str, Any]]] = {
    "nesterov": (
        {"name": "sgd", "momentum": 0.9, "nesterov": True},
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "fused": True},
    ),
    "dampening": (
        {"name": "sgd", "momentum": 0.9, "dampening": 0.5},
        torch.optim.SGD,
        {"momentum": 0.9, "dampening": 0.5, "fused": True},
    ),
    "adam": ("adam", torch.optim.Adam, {"fused": True}),
    "adamw": ({"name": "adamw", "betas": (0.8, 0.9)}, torch.optim.AdamW, {"betas": (0.8, 0.9), "fused": True}),
    "amsgrad": ({"name": "adam", "amsgrad": True}, torch.optim.Adam, {"amsgrad": True, "fused": True}),
    "adagrad": ("adagrad", torch.optim.Adagrad, {"fused": True}),
    "rmsprop": ({"name": "rmsprop", "centered": True}, torch.optim.RMSprop, {"centered": True, "momentum": 0.0}),
    "nadam": (torch.optim.NAdam, torch.optim.NAdam, {}),
}


@pytest.mark.parametrize("kept", [False, True], ids=["at once", "state kept between"])
@pytest.mark.parametrize("choice", CHOICES)
def test_steps_are_those_of_torch_to_the_bit(choice: str, kept: bool) -> None:
    """Two groups with another rate and without decay; the rate changes; the state may travel as tensors."""
    chosen, cls, options = CHOICES[choice]
    rng = torch.Generator().manual_seed(0)
    start = {name: torch.randn(5, 3, generator=rng) for name in "ab"}
    ours, theirs = ({name: nn.Parameter(value.clone()) for name, value in start.items()} for _ in range(2))
    training = Training(optimizer=LocalOptimizer.of(chosen), lr=0.1, weight_decay=0.01)
    groups = [ParameterGroup(["a"]), ParameterGroup(["b"], lr_factor=0.5, weight_decay=False)]
    stepper = descent(training, groups, ours, {})
    given = [{"params": [theirs["a"]]}, {"params": [theirs["b"]], "weight_decay": 0.0}]
    plain = cls(given, lr=0.1, weight_decay=0.01, **options)  # type: ignore[call-arg]
    for step in range(4):
        rate = 0.1 / (1 + step)
        for name in start:
            gradient = torch.randn(5, 3, generator=rng)
            ours[name].grad, theirs[name].grad = gradient, gradient.clone()
        stepper.step(rate)
        plain.param_groups[0]["lr"], plain.param_groups[1]["lr"] = rate, rate * 0.5
        plain.step()
        assert all(torch.equal(ours[name], theirs[name]) for name in start)
        if kept:
            stepper = descent(training, groups, ours, unpacked(packed(stepper.states(), choice)))


def test_states_are_tensors_and_numbers_and_nothing_else() -> None:
    states: dict[str, dict[str, Any]] = {"fc.weight": {"step": 3, "scale": 0.1, "seen": True, "sum": torch.ones(2)}}
    tensors = packed(states, "mine")
    assert sorted(tensors) == ["scale#/fc.weight", "seen#/fc.weight", "step#/fc.weight", "sum/fc.weight"]
    back = unpacked(tensors)["fc.weight"]
    assert [type(back[key]) for key in ("step", "scale", "seen")] == [int, float, bool] and back["scale"] == 0.1
    assert back["sum"].equal(torch.ones(2)) and back["sum"] is not states["fc.weight"]["sum"]
    with pytest.raises(ValueError, match=r"optimizer.keep_state: 'past' of mine is a list, not a tensor or a number"):
        packed({"x": {"past": []}}, "mine")


@pytest.mark.parametrize(("chosen", "count"), [("sgd", 0), ("adam", 2), ("adagrad", 1), ("rmsprop", 1)])
def test_the_size_of_the_state_is_counted(chosen: str, count: int) -> None:
    assert state_tensors(Training(optimizer=chosen)) == count


def test_an_optimizer_that_cannot_take_a_step_is_named() -> None:
    for chosen in (LocalOptimizer("torch.optim:SparseAdam"), LocalOptimizer("adamw", options={"betas": 0.9})):
        with pytest.raises(ValueError, match=f"train.optimizer: {chosen.name}: "):
            state_tensors(Training(optimizer=chosen))


def test_an_optimizer_that_does_not_take_the_models_parameters_is_refused_before_the_first_round() -> None:
    events: list[Any] = []
    with pytest.raises(ValueError, match=r"train.optimizer: torch.optim:Muon: .* only supports 2D parameters"):
        run(local_optimizer=torch.optim.Muon, on_event=events.append)
    assert not events


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"name": "adamw", "betas": (2.0, 0.9)}, r"train.optimizer: adamw: betas should be in \[0, 1\)"),
        ({"name": "adam", "betas": (0.9,)}, "train.optimizer: adam: not enough values"),
        ({"name": "rmsprop", "alpha": -1.0}, "train.optimizer: rmsprop: Invalid alpha value"),
        ({"name": torch.optim.NAdam, "betas": (2.0, 0.9)}, "train.optimizer: torch.optim.nadam:NAdam: Invalid beta"),
    ],
    ids=str,
)
def test_a_run_does_not_start_with_bad_options(chosen: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(local_optimizer=chosen)


def test_clipping_bounds_a_step() -> None:
    start, clipped = run(rounds=0).server.tensors, run(rounds=1, max_grad_norm=0.01, cohort=1).server.tensors
    moved = sum(
        float((clipped[n] - start[n]).square().sum())
        for n in start
        if start[n].is_floating_point() and "running" not in n
    )
    assert 0 < math.sqrt(moved) <= 4 * 0.05 * 0.01 * 1.001  # four steps of rate .05
