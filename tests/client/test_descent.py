"""The local optimizer against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedfactor.client.descent import Descent
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
    descent = Descent(training, [ParameterGroup(["a", "b", "late"])], ours, lr=0.1)
    # An optimizer each, since torch's fused one does not take parameters whose momentum starts at different times.
    plain = [
        torch.optim.SGD([p], lr=0.1, momentum=momentum, weight_decay=weight_decay, fused=True) for p in theirs.values()
    ]
    for step in range(5):
        for name in start:
            gradient = None if name == "late" and step < 2 else torch.randn(40, 30, generator=rng)
            ours[name].grad, theirs[name].grad = gradient, None if gradient is None else gradient.clone()
        descent.step()
        for optimizer in plain:
            optimizer.step()
        assert all(torch.equal(ours[name], theirs[name]) for name in start)
    assert not torch.equal(ours["late"], start["late"])


def test_clipping_bounds_a_step() -> None:
    start, clipped = run(rounds=0).server.tensors, run(rounds=1, max_grad_norm=0.01, cohort=1).server.tensors
    moved = sum(
        float((clipped[n] - start[n]).square().sum())
        for n in start
        if start[n].is_floating_point() and "running" not in n
    )
    assert 0 < math.sqrt(moved) <= 4 * 0.05 * 0.01 * 1.001  # four steps of rate .05
