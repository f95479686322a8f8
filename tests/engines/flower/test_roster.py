"""Who is who among the nodes, which nodes are refused, and the capacities that they report."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import fedfactor
from fedfactor.engines.flower.adapter import ConnectedNode
from fedfactor.engines.flower.roster import Claim
from fedfactor.protocol.message import BadMessage
from fedfactor.runs.execute import run as run_inline
from fedfactor.runs.flower.node import ClientNode
from tests.helpers.grid import FIRST_ID, Deployment, outcome, recipe, refusals


def served(deployed: Deployment) -> dict[str, str]:
    """Return the names of the clients by number."""
    deployed.serve()
    written = json.loads((deployed.run_dir / "flower.json").read_text())
    return {number: client["name"] for number, client in written["clients"].items()}


def test_clients_are_who_they_say_whatever_their_node_ids(tmp_path: Path) -> None:
    chosen = recipe("pfedpara", train={"rounds": 2})
    deployed = Deployment(tmp_path, chosen, configs=[{"client": i} for i in (2, 0, 3, 1)])
    assert outcome(deployed.serve()) == outcome(run_inline(chosen))


def test_names_get_numbers_in_alphabetical_order_and_keep_them(tmp_path: Path) -> None:
    chosen = recipe("pfedpara", train={"rounds": 1})
    names = ["delft", "aachen", "cork", "bergen"]
    deployed = Deployment(tmp_path, chosen, configs=[{"client": name} for name in names])
    expected = {"0": "aachen", "1": "bergen", "2": "cork", "3": "delft"}
    assert served(deployed) == expected
    deployed = Deployment(tmp_path, chosen, configs=[{"client": name} for name in reversed(names)])
    assert served(deployed) == expected


def test_without_a_name_a_client_is_its_key(tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, recipe(train={"rounds": 1}), configs=[{}, {}, {}, {}])
    names = served(deployed)
    assert sorted(names.values()) == list(names.values()) and all(len(name) == 64 for name in names.values())


def test_a_simulated_node_is_its_partition(tmp_path: Path) -> None:
    chosen = recipe("pfedpara", train={"rounds": 1})
    deployed = Deployment(tmp_path, chosen, configs=[{"partition-id": i, "num-partitions": 4} for i in range(4)])
    assert outcome(deployed.serve()) == outcome(run_inline(chosen))


def test_a_client_is_bound_to_its_key_where_keys_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    deployed = Deployment(tmp_path, recipe(train={"rounds": 1}), identity="key", wait=0.1)
    deployed.serve()
    again = Deployment(tmp_path, recipe(train={"rounds": 1}), identity="key", wait=0.1)
    again.grid.keys[FIRST_ID + 2] = b"a stolen name"
    again.serve()
    assert f"node {FIRST_ID + 2} was refused: client 2 first connected with another key" in refusals(caplog)
    assert FIRST_ID + 1 in again.grid.contexts and "client 1" not in refusals(caplog)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"client": 4}, "there is no client 4 in a population of 4"),
        ({"client": -1}, "there is no client -1"),
        ({"client": 0}, "client 0 is already connected, on node"),
        ({"client": True}, "client must be a number in the population, or a name"),
        ({"client": 3, "capacity": 1.5}, "capacity must be a share of the full model"),
        ({"client": 3, "capacty": 0.5}, "a node has no setting 'capacty'"),
    ],
)
def test_a_node_that_cannot_take_part_is_told_why(
    config: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configs = [{"client": 0}, {"client": 1}, {"client": 2}, config]
    deployed = Deployment(tmp_path, recipe(train={"rounds": 1}), configs=configs, wait=0.1)
    result = deployed.serve()
    assert reason in refusals(caplog)
    assert [f["client"] for f in result.history[-1]["failures"]] == [3]


def test_another_version_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ClientNode.hello
    monkeypatch.setattr(ClientNode, "hello", lambda self: {**original(self), "fedfactor": "0.0.1"})
    deployed = Deployment(tmp_path, recipe(train={"rounds": 1}), wait=0.1)
    with pytest.raises(fedfactor.server.federation.QuorumLost), caplog.at_level(logging.WARNING):
        deployed.serve()
    assert f"it runs fedfactor 0.0.1, the server {fedfactor.__version__}: install the same" in refusals(caplog)


def test_a_node_that_has_become_another_client_is_asked_again(tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, recipe(train={"rounds": 3}))
    swapped = []

    def swap(message: Any, reply: Any) -> Any:
        if not swapped:
            swapped.append(True)
            for node, client in ((FIRST_ID, 1), (FIRST_ID + 1, 0)):
                deployed.grid.contexts[node].node_config["client"] = client
        return reply

    deployed.grid.tamper[FIRST_ID + 3] = swap
    reasons = [[f["reason"] for f in event["failures"]] for event in deployed.serve().history[1:]]
    assert any("this node is client" in reason for reason in reasons[0] + reasons[1])
    assert reasons[2] == []


def test_a_damaged_roster_is_named(tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, recipe(train={"rounds": 1}))
    deployed.run_dir.mkdir()
    (deployed.run_dir / "flower.json").write_text('{"run": "x"')
    with pytest.raises(ValueError, match=r"flower\.json is damaged"):
        deployed.serve()


@pytest.mark.parametrize(
    "change",
    [
        {"facts": "["},
        {"facts": "[1]"},
        {"facts": json.dumps({"kind": "classification", "classes": 10, "seen_dtype": "load", "seen_shape": [1]})},
        {
            "facts": json.dumps(
                {"kind": "classification", "classes": 10, "seen_dtype": "uint8", "seen_shape": [1 << 40]}
            )
        },
        {"facts": json.dumps({"kind": "custom", "classes": 0, "outline": {"dtype": "uint8", "shape": [1 << 40]}})},
        {"facts": json.dumps({"kind": "custom", "classes": 0, "outline": {"entries": {"x": [{"dtype": "load"}]}}})},
        {"facts": json.dumps({"kind": "custom", "classes": 0, "outline": {"entries": 1}})},
        {"facts": '{"kind": "custom", "classes": 0, "outline": ' + "[" * 20 + "]" * 20 + "}"},
        {"capacity": float("nan")},
        {"capacity": 2.0},
        {"client": 1.5},
        {"client": "x" * 1000},
        {"fedfactor": 7},
    ],
)
def test_what_a_stranger_says_of_itself_is_not_believed(change: dict[str, Any]) -> None:
    said = {"fedfactor": fedfactor.__version__, "client": 0, "capacity": 0.5, "facts": ""}
    assert Claim.read(ConnectedNode(FIRST_ID, ""), said).capacity == 0.5
    with pytest.raises(BadMessage):
        Claim.read(ConnectedNode(FIRST_ID, ""), {**said, **change})


# Capacities.


def test_capacities_are_the_nodes_own(tmp_path: Path) -> None:
    configs = [
        {"client": 0, "capacity": 0.7},
        {"client": 1, "capacity": 1.0},
        {"client": 2, "capacity": 0.1},
        {"client": 3},
    ]
    chosen = recipe("heterofl", train={"rounds": 1})
    result = Deployment(tmp_path, chosen, configs=configs).serve()
    event = result.history[-1]
    found = dict(zip(event["cohort"], event["capacities"], strict=True))
    drawn = run_inline(chosen).federation.dispatch.participant(3, 0).capacity
    assert found == {0: 0.5, 1: 1.0, 2: 0.5, 3: drawn}
    # What a node says later does not change a run that has begun.
    configs[0]["capacity"] = 1.0
    again = Deployment(tmp_path, chosen, configs=configs)
    again.serve()
    assert json.loads((again.run_dir / "flower.json").read_text())["start"]["capacities"]["0"] == 0.7
