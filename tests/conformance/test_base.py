"""A frozen base is in no message, client state or checkpoint, on any engine, and is the same on all sides."""

from __future__ import annotations

import json
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedfactor import Tune, load
from fedfactor.engines import Pool
from fedfactor.engines.flower.adapter import unpack
from fedfactor.methods import FedPer
from fedfactor.nn.frozen import base_of
from fedfactor.protocol.coding import sections
from fedfactor.protocol.message import decode
from fedfactor.registry import create
from fedfactor.runs.directory import RunError
from fedfactor.runs.execute import run as run_recipe
from fedfactor.runs.flower.node import ClientNode
from fedfactor.runs.recipe import Recipe
from fedfactor.testing.promises import InAnotherProcess, client_network, combinations, refusal
from tests.helpers import grid
from tests.helpers.bases import Adapted, other_base
from tests.helpers.tiny import FAMILIES, METHODS, Recording, Tiny, data, lasting, run


def tuned(model: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    return run(settings.pop("method", "fedavg"), model=model or Adapted(), capacities=None, **settings)


def test_only_trained_parameters_travel() -> None:
    engine = Recording()
    result = tuned(engine=engine, evaluate_clients="all")
    sent = {name for message in map(decode, [*engine.up, *engine.down]) for name in message.tensors}
    assert sent == {"model/down.weight", "model/up.weight"} == {f"model/{name}" for name in result.server.tensors}
    up = [decode(message) for message in engine.up if decode(message).kind == "trained"]
    assert {sum(tensor.numel() for tensor in message.tensors.values()) for message in up} == {2048}
    assert 0 < result.history[0]["dense_bytes"] < 2 * (4 * 2048 + 1000), "plain FedAvg would send no more"


def test_the_given_model_is_neither_changed_nor_changes_the_result() -> None:
    model = Adapted()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = tuned(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    plain = result.model
    assert not torch.equal(plain.up.weight, model.up.weight) and torch.equal(plain.fc.weight, model.fc.weight)
    assert torch.equal(plain.bn.running_mean, model.bn.running_mean)
    assert {type(p) for p in plain.parameters()} == {nn.Parameter}
    with torch.no_grad():
        plain.fc.weight.zero_()  # a user may go on with the model
    assert torch.equal(result.model.fc.weight, before["fc.weight"])


@pytest.mark.parametrize("method", ["fedavg", "local", "fedper", "fedamp", "pfedsd"])
def test_same_bits_in_worker_processes(method: str) -> None:
    settings = {"evaluate_clients": "all", "optimizer": "fedavg"}
    chosen = FedPer(head="up") if method == "fedper" else method
    expected = lasting(tuned(method=chosen, **settings))
    with Pool(2) as pool:
        assert lasting(tuned(method=chosen, engine=pool, **settings)) == expected


def test_large_parameters_are_trained_in_worker_processes() -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
    with Pool(2) as pool:
        there = tuned(wide, engine=pool)
    assert lasting(there) == lasting(tuned(wide))


class _Stop(Exception):
    pass


def test_a_killed_run_resumes_to_the_same_bits_and_stores_no_base(tmp_path: Path) -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "committed" and event["round"] == 1:
            raise _Stop

    with suppress(_Stop):
        tuned(directory=tmp_path / "run", on_event=stop, method="local")
    assert lasting(tuned(directory=tmp_path / "run", method="local")) == lasting(tuned(method="local"))
    torch.manual_seed(0)
    weight = Adapted().fc.weight.detach().numpy().tobytes()
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or weight not in path.read_bytes(), path
    with pytest.raises(ValueError, match=r"base was [0-9a-f]{64} and is now [0-9a-f]{64}"):
        tuned(other_base(), directory=tmp_path / "run", method="local", rounds=3)


def test_a_run_directory_names_its_base_and_opens_only_with_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Adapted()
    result = tuned(model, directory=tmp_path / "run")
    base = result.federation.setup.base_sha256
    assert json.loads((tmp_path / "run" / "task.json").read_text())["base_sha256"] == base != ""
    opened = load(tmp_path / "run", model=model).model()
    x = data().train[0][:5]
    assert torch.equal(opened.eval()(x), result.model.eval()(x))
    with pytest.raises(RunError, match=f"was trained on {base}: use the same weights"):
        load(tmp_path / "run", model=other_base).model()


def test_a_recipe_names_its_base(tmp_path: Path) -> None:
    model = {"name": "tests.helpers.bases:Adapted"}
    chosen = grid.recipe(model=model, capacities={"levels": [1.0], "shares": [1.0]})
    first = run_recipe(chosen, tmp_path / "run")
    recorded = load(tmp_path / "run").recipe.tables["model"]
    assert recorded == {**model, "base_sha256": first.federation.setup.base_sha256}
    assert lasting(run_recipe(chosen, tmp_path / "run", resume=True)) == lasting(first)
    named = grid.recipe(model={**model, "base_sha256": "0" * 64}, capacities={"levels": [1.0], "shares": [1.0]})
    with pytest.raises(RunError, match=r"the recipe asks for the frozen base 0{64}, but the model has [0-9a-f]{64}"):
        run_recipe(named, tmp_path / "other")


def test_same_bits_on_flower_and_a_node_with_another_base_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = grid.recipe(model={"name": "tests.helpers.bases:Adapted"}, capacities={"levels": [1.0], "shares": [1.0]})
    deployment = grid.Deployment(tmp_path, chosen)
    assert grid.outcome(deployment.serve()) == grid.outcome(run_recipe(chosen, tmp_path / "inline"))
    honest = ClientNode.hello

    def hello(self: ClientNode) -> dict[str, Any]:
        said = honest(self)
        return {**said, "base": "0" * 64} if self.client == 2 else said

    monkeypatch.setattr(ClientNode, "hello", hello)
    own = [{"client": i, "data": "digits", "data-options": '{"test_share": 0.8}'} for i in range(4)]
    for place, configs in (("recipe", None), ("nodes", own)):
        caplog.clear()
        done = grid.Deployment(tmp_path / place, chosen, configs=configs, data=place).serve(wait=0.2)
        failed = [[f["client"] for f in event["failures"]] for event in done.history if event["event"] == "round"]
        assert failed == [[2], [2], [2]], place
        assert "the base of its model has the SHA-256 000" in grid.refusals(caplog)
        assert "give it the same pre-trained weights" in grid.refusals(caplog)


def test_models_that_cannot_be_tuned_are_refused_in_words() -> None:
    frozen = Tiny().requires_grad_(False)
    with pytest.raises(ValueError, match="all parameters of the model are frozen"):
        run(model=frozen, capacities=None)

    def partly(width: float = 1.0) -> nn.Module:
        model = Tiny(width)
        model.conv1.requires_grad_(False)
        return model

    with pytest.raises(ValueError, match=r"heterofl trains networks of other widths, but the frozen parameters"):
        run("heterofl", model=partly)


# Every method on the change of a frozen base.

TUNE = Tune(targets=("conv2", "hidden"), train=("fc",))
TUNABLE = [name for name in METHODS if not create("methods", name).untunable and name != "fedbn"]
"""FedBN needs batch norms that are trained, but here all are frozen."""


def change(method: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return run(method, **{"model": Tiny(), "tune": TUNE, **settings})


@pytest.mark.parametrize("method", TUNABLE)
def test_every_method_tunes_a_frozen_base(method: str, tmp_path: Path) -> None:
    """Neither the base nor private tensors travel, clients elsewhere give the same bits, and so does a resumed run.

    Elsewhere is a worker process for one method per family: workers get what `InAnotherProcess` copies.
    """
    engine = Recording()
    whole = change(method, engine=engine, evaluate_clients="all")
    setup, first = whole.federation.setup, change(method, rounds=0).model
    assert all(torch.equal(first.state_dict()[name], tensor) for name, tensor in given_body().items())
    base, private = base_of(setup.build()), setup.method.private_names(setup.network(1.0))
    assert "conv1.weight" in base and "bn1.running_mean" in base and "conv2.base" in base
    for message in map(decode, [*engine.up, *engine.down]):
        names = {name.partition("/")[2].partition(":")[0] for name in message.tensors}
        assert not names & {*base, *private, "conv2.weight", "hidden.weight"}
    assert not {*whole.server.tensors} & {*base}
    secrets = [given_body()[f"{name}.weight"].numpy().tobytes() for name in ("conv1", "conv2", "hidden")]
    assert not any(secret in message for secret in secrets for message in [*engine.up, *engine.down])
    with Pool(2) if method in FAMILIES else nullcontext(InAnotherProcess()) as elsewhere:
        assert lasting(change(method, engine=elsewhere, evaluate_clients="all")) == lasting(whole)

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "committed" and event["round"] == 1:
            raise _Stop

    with suppress(_Stop):
        change(method, directory=tmp_path / "run", on_event=stop, evaluate_clients="all")
    assert lasting(change(method, directory=tmp_path / "run", evaluate_clients="all")) == lasting(whole)
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or not any(secret in path.read_bytes() for secret in secrets), path


def given_body() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: tensor for name, tensor in Tiny().state_dict().items() if not name.startswith("fc")}


LORA = [name for name in METHODS if "lora" in name or name in ("fedsvd", "fed_sb")]


def adapter_recipe(method: str, **settings: Any) -> Recipe:
    """Return two rounds of three of four clients, with ranks 8 and 4 where a method has them."""
    options = {"targets": ["hidden"], "train": ["fc"]}
    return grid.recipe(method, tune=options, **{"train": {"rounds": 2, "cohort": 3}, **settings})


@pytest.mark.parametrize("method", LORA)
def test_adapters_give_the_same_bits_on_flower(method: str, tmp_path: Path) -> None:
    """Nothing private and nothing of the base reaches the server."""
    chosen = adapter_recipe(method)
    deployment = grid.Deployment(tmp_path, chosen)
    result = deployment.serve()
    assert grid.outcome(result) == grid.outcome(run_recipe(chosen)) and result.summary["failures"] == 0
    setup = result.federation.setup
    private = setup.method.private_names(setup.network(1.0))
    assert bool(private) == (method == "fedsa_lora")
    weight = base_of(setup.build())["hidden.base"].numpy().tobytes()
    for message in [*deployment.grid.pushed, *deployment.grid.pulled]:
        sent = bytes(unpack(message.content)[0] or b"")
        assert weight not in sent
        assert not sent or not private & {*sections(decode(bytearray(sent)).tensors).get("model", {})}
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or weight not in path.read_bytes(), path


def test_a_node_that_lost_its_state_gets_all_moves_of_the_base_anew(tmp_path: Path) -> None:
    """The server cannot know who has lost it, so all clients get the sum, and come to the same model."""
    chosen = adapter_recipe("flora", train={"rounds": 3, "cohort": 4})
    deployment = grid.Deployment(tmp_path, chosen, **{"lost-state": "restart"})

    def lose(message: Any, reply: Any) -> Any:
        for path in (tmp_path / "node-1").rglob("client-1/*"):
            path.unlink()
        return reply

    deployment.grid.tamper[grid.FIRST_ID + 1] = lose
    result, expected = deployment.serve(), run_recipe(chosen)
    assert result.summary["failures"] == 0
    assert result.summary["weights_sha256"] == expected.summary["weights_sha256"]


@pytest.mark.parametrize("method", sorted({*METHODS} - {*TUNABLE}))
def test_other_methods_say_why_they_cannot(method: str) -> None:
    with pytest.raises(
        ValueError, match=r"cannot fine-tune a frozen base \(\[tune\]\): |fedbn keeps batch norms private"
    ):
        change(method)


@pytest.mark.parametrize("method", ["lora", "fedpara", "feddecomp", "flexlora", "fedavg"])
def test_methods_tune_with_every_optimizer_and_codec(method: str) -> None:
    made = create("methods", method)
    for optimizer, codec in combinations(made):
        if refusal(made, optimizer, codec) is None:
            result = change(method, optimizer=optimizer, codec=codec)
            assert result.summary["failures"] == 0, (optimizer, codec)


def test_a_tuned_client_of_another_process_computes_what_is_deployed() -> None:
    result = change("pfedpara", cohort=6)
    for client in range(2):
        network = client_network(result, client).eval()
        x = data().train[0][:5]
        torch.testing.assert_close(result.client_model(client).eval()(x), network(x), rtol=1e-4, atol=1e-5)
