"""The ClientApp: a node's own data, its capacity and where it keeps its state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfactor.data import Dataset, load
from fedfactor.runs.flower.node import ClientNode, free_bytes, needed_bytes, state_folder, training_seconds
from tests.helpers.grid import Deployment, recipe, refusals


def test_a_device_measures_what_it_can_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"client": 1, "capacity": "measure"}
    deployed = Deployment(tmp_path, recipe("heterofl"))
    node = ClientNode(deployed.config["recipe"], False, 3600.0, config)
    assert node.measured() == 1.0
    setup, _ = node._task()
    assert training_seconds(setup, 1, 1.0) > 0
    full, half = needed_bytes(setup, 1, 1.0), needed_bytes(setup, 1, 0.5)
    assert full > half > 4 * 4 * sum(p.numel() for p in setup.network(0.5).parameters())
    assert 0 < free_bytes(torch.device("cpu")) < 2**50
    assert ClientNode(deployed.config["recipe"], False, 1e-9, config).measured() == 0.5, (
        "too slow for any: the smallest"
    )
    monkeypatch.setattr("fedfactor.runs.flower.node.free_bytes", lambda device: (full + half) / 2)
    assert node.measured() == 0.5, "the full model does not fit the memory"
    assert node.hello()["capacity"] == 0.5


def some_digits(part: int, of: int) -> Dataset:
    """A device's own pictures."""
    whole = load("digits")
    rows = slice(part, None, of)
    return Dataset(
        "own", (whole.train[0][rows], whole.train[1][rows]), (whole.test[0][:0], whole.test[1][:0]), whole.class_names
    )


def test_nodes_with_data_of_their_own(tmp_path: Path) -> None:
    configs: list[dict[str, Any]] = [
        {
            "client": i,
            "data": "tests.runs.flower.test_node:some_digits",
            "data-options": json.dumps({"part": i, "of": 5 + i}),
        }
        for i in range(3)
    ]
    configs.append({"client": 3, "data": "digits", "data-options": '{"test_share": 0.5}'})
    chosen = recipe("pfedpara", train={"rounds": 2}, evaluate={"clients": "all"}, partition={"train_share": 1.0})
    deployed = Deployment(tmp_path, chosen, configs=configs, data="nodes")
    result = deployed.serve()
    assert result.summary["totals"]["failures"] == 0 and result.history[-1]["all"]["clients"] == 4
    assert float(result.federation.setup.task.data.train[0].abs().max()) == 0
    assert "global" not in result.history[-1], "the server has no data to measure on"
    again = Deployment(tmp_path, chosen, configs=configs, data="nodes")
    assert again.serve().summary["weights_sha256"] == result.summary["weights_sha256"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "name a data set or package.module:function"),
        ({"data": "digits", "data-options": "[1]"}, "data-options must be a JSON object"),
        ({"data": "digits", "data-options": '{"nonsense": 1}'}, "has no option 'nonsense'"),
        ({"data": "tests.runs.flower.test_node:nothing"}, "has no attribute 'nothing'"),
        ({"data": "tests.runs.flower.test_node:a_word"}, "should return a fedfactor.data.Dataset, got a str"),
    ],
)
def test_data_that_cannot_be_loaded_are_named(
    config: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deployed = Deployment(tmp_path, recipe(), configs=[{"client": 0, **config}], data="nodes", wait=0.05)
    with pytest.raises(RuntimeError, match="0 of 4 clients connected within"):
        deployed.serve()
    assert reason in refusals(caplog)


def a_word() -> str:
    return "digits"


def test_states_have_a_place_of_their_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert state_folder() == Path("/somewhere/fedfactor")
