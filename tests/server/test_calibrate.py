"""Norm statistics that are estimated on the clients' data."""

from __future__ import annotations

import torch
from torch import nn

from fedfactor.methods import HeteroFL
from fedfactor.testing.federation import Recording
from tests.helpers.networks import Text
from tests.helpers.tiny import data, run


def test_calibration_is_counted_apart_both_ways() -> None:
    engine = Recording()
    event = run(HeteroFL(static_norm=True), engine=engine, rounds=1).history[-1]
    moved = sum(map(len, engine.down)) + sum(map(len, engine.up))
    assert event["bytes_calibration"] == moved - event["bytes_down"] - event["bytes_up"] > 0


def test_static_norms_are_calibrated_on_all_clients() -> None:
    result = run(HeteroFL(static_norm=True))
    model = result.model_at(0.5).eval()
    assert model.bn1.running_mean is not None
    x = data().train[0][torch.cat(list(data().train_of))]
    inside: list[torch.Tensor] = []
    model.bn1.register_forward_pre_hook(lambda m, inputs: inside.append(inputs[0]))
    model(x)
    torch.testing.assert_close(model.bn1.running_mean, inside[0].mean((0, 2, 3)), rtol=1e-3, atol=1e-4)


class Folded(nn.Module):
    """A norm without weights over all rows of all digits: its first axis is eight times the batch."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        self.row = nn.Linear(8, int(4 * width))
        self.norm = nn.BatchNorm1d(int(4 * width), affine=False)
        self.fc = nn.Linear(int(32 * width), 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(self.row(x.reshape(-1, 8)))
        return self.fc(rows.reshape(len(x), -1))


def test_static_statistics_of_norms_over_more_than_the_batch() -> None:
    result = run(HeteroFL(), model=Folded, rounds=1)
    model, data = result.model_at(1.0).eval(), result.federation.setup.task.data
    seen = model.row(data.train[0][torch.cat(list(data.train_of))].reshape(-1, 8))
    torch.testing.assert_close(model.norm.running_mean, seen.mean(0), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model.norm.running_var, seen.var(0), rtol=0.1, atol=1e-3)


def test_no_client_is_asked_for_statistics_that_nothing_needs() -> None:
    event = run(HeteroFL(), model=Text, rounds=1).history[-1]
    assert event["bytes_calibration"] == 0
