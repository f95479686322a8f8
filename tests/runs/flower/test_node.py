"""The ClientApp: a node's own data, its capacity, where it keeps its state, and its model after a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedfactor
from fedfactor.data import Dataset, load
from fedfactor.export import ExportError
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.message import read_weights
from fedfactor.runs.directory import RunError, lacking
from fedfactor.runs.execute import run
from fedfactor.runs.flower.node import ClientNode, free_bytes, needed_bytes, state_folder, training_seconds
from fedfactor.runs.recipe import Recipe
from tests.helpers import command
from tests.helpers.grid import FIRST_ID, Deployment, kind_of, recipe, refusals


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


def spoilt_digits(label: int) -> Dataset:
    """A device's own pictures, one of them with a wrong label."""
    made = some_digits(0, 5)
    made.train[1][7] = label
    return made


@pytest.mark.parametrize(
    ("label", "message"), [(-1, "must not be negative, got -1"), (10, "must be less than 10, .*, got 10")]
)
def test_a_node_refuses_targets_that_do_not_fit(label: int, message: str, tmp_path: Path) -> None:
    config = {"data": "tests.runs.flower.test_node:spoilt_digits", "data-options": json.dumps({"label": label})}
    chosen = recipe("fedavg", partition={"train_share": 1.0})
    node = ClientNode(Deployment(tmp_path, chosen).config["recipe"], True, 3600.0, {"client": 3, **config})
    with pytest.raises(ValueError, match=rf"{message} in row 7 of the training data$"):
        node.hello()


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


def test_nodes_read_datasets_of_their_own(tmp_path: Path) -> None:
    here = "tests.helpers.sequences"
    configs: list[dict[str, Any]] = [
        {"client": i, "data": f"{here}:one_owner", "data-options": json.dumps({"seed": i})} for i in range(4)
    ]
    chosen = recipe(
        "fedavg", model={"name": f"{here}:Bag"}, train={"rounds": 2}, evaluate={"clients": "all"},
        objective={"loss": f"{here}:doubled", "kind": "classification"}, partition={"train_share": 1.0},
    )  # fmt: skip
    result = Deployment(tmp_path, chosen, configs=configs, data="nodes").serve()
    assert result.summary["totals"]["failures"] == 0 and result.history[-1]["all"]["clients"] == 4
    assert result.summary["macs"] > 0, "counted on a batch of the form that nodes describe"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "name a data set or package.module:function"),
        ({"data": "digits", "data-options": "[1]"}, "data-options must be a JSON object"),
        ({"data": "digits", "data-options": '{"nonsense": 1}'}, "has no option 'nonsense'"),
        ({"data": "tests.runs.flower.test_node:nothing"}, "has no attribute 'nothing'"),
        ({"data": "tests.runs.flower.test_node:a_word"}, "map-style dataset or a list of them, got a str"),
    ],
)
def test_data_that_cannot_be_loaded_are_named(
    config: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deployed = Deployment(tmp_path, recipe(), configs=[{"client": 0, **config}], data="nodes", wait=0.05)
    with pytest.raises(RuntimeError, match=rf"0 of 4 clients connected within .* node \d+ was refused: .*{reason}"):
        deployed.serve()
    assert reason in refusals(caplog)


def a_word() -> str:
    return "digits"


def test_states_have_a_place_of_their_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert state_folder() == Path("/somewhere/fedfactor")


# After a run with private parts, each node has a run directory from which its own model can be exported.


def short(method: str, **sections: object) -> Recipe:
    return recipe(method, train={"rounds": 1, "cohort": 3}, evaluate={"clients": "all"}, **sections)


def stored(deployed: Deployment, client: int) -> Path:
    """Return the run directory on a node."""
    (found,) = (deployed.folder / f"node-{client}").glob(f"*/client-{client}")
    return found


PRIVATE = (
    "fedamp",
    "fedbn",
    "fedcac",
    "feddecomp",
    "fedper",
    "fedrep",
    "fedrod",
    "lg_fedavg",
    "local",
    "pfedgate",
    "pfedpara",
)


@pytest.mark.parametrize("method", [*PRIVATE, "fedavg"])
def test_a_node_has_the_model_that_the_same_run_on_one_machine_has(method: str, tmp_path: Path) -> None:
    chosen = short(method)
    deployed = Deployment(tmp_path, chosen)
    deployed.serve()
    if method == "fedavg":  # the clients' models are the server's
        assert not list(tmp_path.glob("node-*/*/*/checkpoint"))
        return
    run(chosen, tmp_path / "inline")
    assert lacking(deployed.run_dir) == []
    for client in range(4):
        expected = tensors_of(fedfactor.load(tmp_path / "inline").model(client=client))
        found = tensors_of(fedfactor.load(stored(deployed, client)).model())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_export_on_a_node(tmp_path: Path) -> None:
    chosen = short("pfedpara", codec={"name": "float16"})
    deployed = Deployment(tmp_path, chosen)
    deployed.serve()
    done = command.fedfactor("export", str(stored(deployed, 2)), "-o", str(tmp_path / "mine.safetensors"))
    assert done.exit_code == 0, done.output
    own = json.loads((deployed.run_dir / "metrics.jsonl").read_text().splitlines()[-1])["all"]["each"][2]
    assert f"accuracy {own:.4f} on the test data" in done.stdout
    card = (tmp_path / "mine.card.md").read_text()
    assert "The model of client 2" in card and "after 1 of 1 rounds" in card and "multiply-accumulates" not in card
    again = command.fedfactor(
        "export", str(stored(deployed, 2)), "--client", "1", "-o", str(tmp_path / "other.safetensors")
    )
    assert again.exit_code == 2 and "has the model of client 2 only, not of client 1" in again.stderr
    resumed = command.fedfactor(
        "run", str(stored(deployed, 2) / "recipe.toml"), "--out", str(stored(deployed, 2)), "--resume"
    )
    assert resumed.exit_code == 2


def test_export_on_a_node_with_its_own_data(tmp_path: Path) -> None:
    configs = [{"client": name, "data": "digits", "data-options": '{"test_share": 0.8}'} for name in "dcba"]
    deployed = Deployment(tmp_path, short("fedper", partition={"train_share": 1.0}), configs=configs, data="nodes")
    deployed.serve()
    own = json.loads((deployed.run_dir / "metrics.jsonl").read_text().splitlines()[-1])["all"]["each"][3]
    (directory,) = (tmp_path / "node-0").glob("*/client-3")  # "d" is the last of the names
    done = command.fedfactor("export", str(directory), "-o", str(tmp_path / "mine.safetensors"))
    assert done.exit_code == 0, done.output
    assert f"accuracy {own:.4f} on the test data" in done.stdout
    assert read_weights(tmp_path / "mine.safetensors")


def test_a_node_that_was_away_gets_the_model_when_the_server_starts_again(tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, short("fedper"), wait=0.2)
    deployed.grid.full = {FIRST_ID + 1}
    before = deployed.serve(deadline=0.5).summary
    assert lacking(deployed.run_dir) == [1]
    deployed.grid.full = set()
    sent = len(deployed.grid.pushed)
    assert deployed.serve().summary == before
    assert lacking(deployed.run_dir) == []
    assert [kind_of(message) for message in deployed.grid.pushed[sent:]].count("store") == 1, "the others have it"
    assert fedfactor.load(stored(deployed, 1)).model()


def test_a_server_still_has_no_personal_model(tmp_path: Path) -> None:
    deployed = Deployment(tmp_path, short("fedper"))
    deployed.serve()
    with pytest.raises((RunError, ExportError, LookupError), match="on the client's own device"):
        fedfactor.load(deployed.run_dir).model(client=0)
