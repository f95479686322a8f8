"""Slim: FedAvg on the narrowest network."""

from __future__ import annotations

import pytest

from fedfactor.methods import Slim
from fedfactor.nn.state import weights_sha256
from tests.helpers.tiny import Tiny, run


def test_slim_is_fedavg_on_the_narrowest_network() -> None:
    """Whatever the capacities, fixed or not, and the server has nothing larger."""
    slim = run(Slim(), capacities={1.0: 0.5, 0.5: 0.5})
    assert slim.server.tensors["conv2.weight"].shape == (8, 4, 3, 3)
    plain = run("fedavg", model=lambda: Tiny(0.5), capacities={1.0: 1.0})
    assert weights_sha256(slim.server.tensors) == weights_sha256(plain.server.tensors)
    assert slim.model.fc.in_features == 16 and list(slim.history[-1]["global"]) == ["0.5"]
    assert run(Slim(width=0.25)).server.tensors["conv2.weight"].shape == (4, 2, 3, 3)
    with pytest.raises(ValueError, match=r"capacity 0\.5 cannot train a network of width 0\.75"):
        run(Slim(width=0.75))
