"""FedAvg by hand."""

from __future__ import annotations

import pytest

from tests.helpers.quadratic import clients, run, x


def test_fedavg() -> None:
    assert x(run()) == pytest.approx(-0.085)


def test_fedavg_weights_by_examples() -> None:
    """y = (.19, -.36), weighted 3 : 1."""
    assert x(run(data=clients((1.0, 1.0), (2.0, -1.0), copies=(3, 1)))) == pytest.approx((3 * 0.19 - 0.36) / 4)
