"""FedAdam by hand."""

from __future__ import annotations

import pytest
import torch

from fedfactor.optimizers import FedAdam
from fedfactor.protocol.optimizer import Step
from tests.helpers.tiny import run as tiny


def test_fedadam_starts_v_at_tau_squared_and_corrects_no_bias() -> None:
    """Mean changes -.3 then -.1 from x = 1: one client that lands there in one step."""
    optimizer = FedAdam(server_lr=0.01, beta1=0.9, beta2=0.99, tau=1e-3)
    weights = {"x": torch.tensor([1.0], dtype=torch.float64)}
    moments = optimizer.start(weights)
    for change, expected in ((-0.3, 0.99032773), (-0.1, 0.97894161)):
        weights, moments = optimizer.step(Step(weights, {"x": weights["x"] + change}, {"x": 1}, moments, {}, 1))
        assert float(weights["x"]) == pytest.approx(expected, abs=5e-9)


def test_fedadam_leaves_alone_what_nobody_held() -> None:
    optimizer = FedAdam()
    weights = {"x": torch.tensor([1.0, 1.0])}
    moments = {"m": {"x": torch.tensor([5.0, 5.0])}, "v": {"x": torch.tensor([1.0, 1.0])}}
    mean, held = {"x": torch.tensor([2.0, 1.0])}, {"x": torch.tensor([1.0, 0.0])}
    new, after = optimizer.step(Step(weights, mean, held, moments, {}, 1))
    assert new["x"][0] != 1 and new["x"][1] == 1 and after["m"]["x"][1] == 5


def test_fedadam_averages_batch_statistics_instead_of_stepping_them() -> None:
    adam, plain = tiny(optimizer="fedadam", rounds=1), tiny(rounds=1)
    for name in ("bn1.running_mean", "bn1.running_var", "bn1.num_batches_tracked"):
        assert torch.equal(adam.server.tensors[name], plain.server.tensors[name])
