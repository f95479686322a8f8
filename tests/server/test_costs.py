"""Costs of a round: operations, bytes, seconds on a link and energy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import fedfactor
from fedfactor.protocol.settings import Schedule
from tests.helpers.tiny import data, run


def test_costs_of_a_round() -> None:
    """Three clients of 40 examples, one epoch; bytes over links as FedPara counts them; energy only if given."""
    from fedfactor import cost

    result = run(rounds=1, joules_per_byte=1e-6, capacities={1.0: 1.0})
    event = result.history[-1]
    network = result.federation.setup.network(1.0).train()
    assert event["macs"] == cost.measure(network, data().train[0][:10]).macs / 10 * 120
    assert event["joules"] == pytest.approx(1e-6 * (event["bytes_down"] + event["bytes_up"]))
    size = (event["bytes_down"] + event["bytes_up"]) / 3
    slow, fast = event["link_seconds"]["2"], event["link_seconds"]["50"]
    assert slow - fast == pytest.approx(
        cost.link_seconds(size, 2, transfers=1) - cost.link_seconds(size, 50, transfers=1)
    )
    assert "joules" not in run(rounds=1).history[-1]


def test_a_round_says_its_learning_rate() -> None:
    rounds = run(rounds=3, lr=0.4, schedule=Schedule("exponential", decay=0.5)).history[1:]
    assert [event["lr"] for event in rounds] == pytest.approx([0.4, 0.2, 0.1])


X, Y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3


class Looking(nn.Linear):
    """A model that looks at its numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / 2 if x.max() > 100 else x)


class Uncounted(nn.Linear):
    """A model that refuses to be counted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("no modes here")
        return super().forward(x)


def test_a_model_that_looks_at_its_numbers_is_trained_and_counted() -> None:
    ours, plain = (fedfactor.simulate(model(4, 3), (X, Y), rounds=2, clients=3) for model in (Looking, nn.Linear))
    assert ours.summary["totals"]["macs"] == plain.summary["totals"]["macs"] == 2 * 60 * 12


def test_a_model_that_cannot_be_counted_is_trained_without_the_figure(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="operations cannot be counted: no modes here. The run goes on"):
        result = fedfactor.simulate(Uncounted(4, 3), (X, Y), rounds=2, clients=3, directory=tmp_path)
    assert [event["macs"] for event in result.history[1:]] == [None, None]
    assert result.summary["totals"]["macs"] is None and result.summary["macs"] is None
    assert "MACs not counted" in str(result)
    with pytest.warns(UserWarning, match="cannot be counted"):
        more = fedfactor.simulate(Uncounted(4, 3), (X, Y), rounds=3, clients=3, directory=tmp_path)
    assert more.summary["totals"]["macs"] is None and more.summary["totals"]["bytes_up"] > 0
    read: Any = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert read == more.history
