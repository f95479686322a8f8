"""FedAMP by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fedfactor.methods import FedAMP, Participant
from fedfactor.protocol.context import Context
from fedfactor.protocol.states import HeldTensors
from tests.helpers.quadratic import Point, run, x


def test_fedamp_by_hand() -> None:
    """w = (0, 0) and (1, 1), sigma 2, alpha .5, lambda 1: u1 = (.09197, .09197), a step from w1 (.218394, .018394)."""
    method = FedAMP(strength=1.0, alpha=0.5, sigma=2.0)
    held = {0: {"x": torch.zeros(2, dtype=torch.float64)}, 1: {"x": torch.ones(2, dtype=torch.float64)}}
    for client, expected in ((0, 0.09197), (1, 0.90803)):
        u = method.download({}, Participant(client, 1.0, 0), {}, held, Point())["x"]
        assert u.tolist() == pytest.approx([expected] * 2, abs=5e-6)
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    u1 = method.download({}, Participant(0, 1.0, 0), {}, held, Point())["x"]
    network = nn.Module()
    network.x = nn.Parameter(w.detach().clone())

    target = torch.tensor([2.0, 0.0], dtype=torch.float64)
    task = SimpleNamespace(outputs=lambda *_: None, loss=lambda *_: ((network.x - target) ** 2).sum() / 2)
    ctx = SimpleNamespace(task=task, down={"x": u1}, round=0)
    network.forward = lambda inputs: inputs  # type: ignore[method-assign]
    method.objective(network, (w, w), ctx).backward()  # type: ignore[arg-type]
    stepped = network.x.detach() - 0.1 * network.x.grad
    assert stepped.tolist() == pytest.approx([0.218394, 0.018394], abs=1e-6)


def test_fedamp_decays_alpha_by_rounds() -> None:
    method = FedAMP()
    assert [method.alpha_of(r) for r in (0, 29, 30, 60)] == [1e4, 1e4, pytest.approx(1e3), pytest.approx(1e2)]


def test_fedamp_two_rounds_through_the_loop() -> None:
    """Both clients start at 0; round 1 is local; round 2 starts from each one's own w and is pulled towards u."""

    @dataclass(frozen=True)
    class QuadraticAMP(FedAMP):
        def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
            a, b = batch[0].unbind(1)
            pull = self.strength / (2 * self.alpha_of(ctx.round)) * (network.x - ctx.down["x"]) ** 2
            return (a / 2 * (network.x - b) ** 2).mean() + pull.sum()

    method = QuadraticAMP(strength=1.0, alpha=0.5, sigma=2.0)
    one = run(rounds=1, method=method, epochs=1)
    held = [float(HeldTensors(one.federation.store, "server")[c]["x"]) for c in range(2)]
    assert held == pytest.approx([0.1, -0.2])  # x - .1 (x - 1), and x - .2 (x + 1)
    two = run(rounds=2, method=method, epochs=1)
    attention = 0.5 * math.exp(-(0.3**2) / 2) / 2
    u = [0.1 + attention * (-0.2 - 0.1), -0.2 + attention * (0.1 + 0.2)]
    expected = [0.1 - 0.1 * ((0.1 - 1) + 2 * (0.1 - u[0])), -0.2 - 0.1 * (2 * (-0.2 + 1) + 2 * (-0.2 - u[1]))]
    held = [float(HeldTensors(two.federation.store, "server")[c]["x"]) for c in range(2)]
    assert held == pytest.approx(expected)
    assert x(two) == 0.0  # the server's tensors are where all start, and stay so
