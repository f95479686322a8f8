"""Costs of a round: operations, bytes, seconds on a link and energy."""

from __future__ import annotations

import pytest

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
