"""`fedfactor.simulate`, `list_methods`, `create_method` and `list_models`: what they take, and what they say."""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from typer.testing import CliRunner

import fedfactor
from fedfactor.cli.main import app
from fedfactor.export import ExportError, export
from fedfactor.methods import FedAvg, FedPara
from fedfactor.protocol.settings import Rounds, Training
from fedfactor.report import report
from fedfactor.runs.directory import RunError
from fedfactor.runs.execute import run as execute
from tests.helpers.recipes import recipe
from tests.helpers.tiny import Tiny, data, lasting, run

PARAMETERS = inspect.signature(fedfactor.simulate).parameters


@pytest.mark.parametrize("settings", [Training, Rounds])
def test_the_settings_are_parameters_with_the_same_defaults(settings: type) -> None:
    names = [field.name for field in dataclasses.fields(settings) if field.name != "optimizer"]
    assert [name for name in PARAMETERS if name in names] == names
    assert settings(**{name: PARAMETERS[name].default for name in names}) == settings()
    assert Training(optimizer=PARAMETERS["local_optimizer"].default) == Training()
    ours, theirs = get_type_hints(fedfactor.simulate), get_type_hints(settings)
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}


def test_every_parameter_is_documented() -> None:
    section = (fedfactor.simulate.__doc__ or "").partition("Args:")[2].partition("Raises:")[0]
    assert re.findall(r"^        (\w+): \S", section, re.MULTILINE) == [
        name for name in PARAMETERS if name != "unknown"
    ]


def test_mistakes_in_names_are_explained() -> None:
    for old, new in {"batch": "batch_size", "clip": "max_grad_norm"}.items():
        with pytest.raises(TypeError, match=f"{old} is now {new}"):
            fedfactor.simulate(None, None, **{old: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no parameter 'epoch'; did you mean 'epochs'\\? there are model, data, test"):
        fedfactor.simulate(None, None, epoch=1)  # type: ignore[arg-type]


def test_methods_and_models_are_listed_by_pattern() -> None:
    found = fedfactor.list_methods("fed*")
    assert {"fedavg", "fedpara"} <= set(found) and all(name.startswith("fed") for name in found)
    assert found == sorted(found) and set(found) < set(fedfactor.list_methods())
    assert fedfactor.list_models("resnet1?") == ["resnet10", "resnet18"]
    assert fedfactor.list_methods("nothing*") == []


def test_a_method_is_created_by_name() -> None:
    assert fedfactor.create_method("fedpara", gamma=0.3) == FedPara(gamma=0.3)
    with pytest.raises(ValueError, match="no method is called 'fedparra'; did you mean 'fedpara'"):
        fedfactor.create_method("fedparra")
    with pytest.raises(ValueError, match="method fedpara has no field 'gama'; did you mean 'gamma'"):
        fedfactor.create_method("fedpara", gama=0.3)


def test_public_names_are_all_there() -> None:
    for name in fedfactor.__all__:
        assert getattr(fedfactor, name).__name__ == name


# In a directory.


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run from Python with private tensors."""
    run("fedper", directory=tmp_path / "mine", evaluate_clients="all", target=0.1, max_grad_norm=1.5)
    return tmp_path / "mine"


def test_its_models_open_with_the_model_in_any_form(directory: Path) -> None:
    result = run("fedper", directory=directory, evaluate_clients="all", target=0.1, max_grad_norm=1.5)
    x = torch.randn(4, 1, 8, 8)
    for model in (Tiny, "tests.helpers.tiny:Tiny"):
        opened = fedfactor.load(directory, model=model)
        assert torch.equal(opened.model().eval()(x), result.model.eval()(x))
        assert torch.equal(opened.model(client=2).eval()(x), result.client_model(2).eval()(x))
    trained = opened.clients()[0]  # others have the private tensors with which the given model starts
    module = fedfactor.load(directory, model=Tiny()).model(client=trained)
    assert torch.equal(module.eval()(x), result.client_model(trained).eval()(x))
    assert opened.summary == result.summary and opened.metrics == result.history
    assert opened.recipe.rounds == result.federation.rounds and opened.recipe.method == result.federation.setup.method
    assert opened.recipe.training == result.federation.setup.training
    assert opened.recipe.capacities == result.federation.capacities
    assert set(opened.recipe.tables) == set(recipe().tables) - {"data", "partition", "objective", "model"}
    assert set(opened.recipe.tables["capacities"]) == set(recipe().tables["capacities"])
    task = fedfactor.Task(Tiny, data())
    assert opened.rebuilt(task).summary == result.summary


def test_a_missing_or_wrong_model_is_named(directory: Path, tmp_path: Path) -> None:
    opened = fedfactor.load(directory)
    assert opened.table()["round"] == [1, 2] and opened.private(opened.clients()[0])
    with pytest.raises(RunError, match=r"mine was started from Python, .* load\(DIR, model=...\), or with --model"):
        opened.model()
    with pytest.raises(RunError, match=r"its data cannot be loaded: .*\.rebuilt\(Task\(model, data\)\)"):
        opened.result()
    with pytest.raises(RunError, match=r"the model has other tensors than the model of .*mine"):
        fedfactor.load(directory, model=Tiny(0.5)).model()
    with pytest.raises(ValueError, match="'tests:Nothing' cannot be imported"):
        fedfactor.load(directory, model="tests:Nothing")
    execute(recipe("train.rounds=1"), tmp_path / "recipe")
    with pytest.raises(RunError, match=r"the recipe of .* names its model; leave out the model"):
        fedfactor.load(tmp_path / "recipe", model=Tiny)


def test_the_directory_of_a_recipe_is_refused(tmp_path: Path) -> None:
    execute(recipe("train.rounds=1"), tmp_path)
    with pytest.raises(RunError, match="holds a run that was started from a recipe; continue it there"):
        run(directory=tmp_path)


def test_more_rounds_extend_it_and_fewer_are_refused(tmp_path: Path) -> None:
    run("fedper", rounds=1, directory=tmp_path)
    assert lasting(run("fedper", rounds=3, directory=tmp_path)) == lasting(run("fedper", rounds=3))
    with pytest.raises(ValueError, match=r"3 rounds are committed, more than train\.rounds = 2"):
        run("fedper", rounds=2, directory=tmp_path)


def test_it_has_a_report(directory: Path, tmp_path: Path) -> None:
    (group,) = report([directory], tmp_path / "report.html")
    assert group.method == "fedper" and group.runs[0].last_round == 2 and group.runs[0].task["clients"] == 6
    assert "Python objects" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("model", [Tiny, "tests.helpers.tiny:Tiny", Tiny()], ids=["class", "name", "module"])
def test_it_is_exported(model: Any, directory: Path, tmp_path: Path) -> None:
    found = export(directory, tmp_path / "model.pt2", model=model, client=1)
    assert found.accuracy is None and "given in Python, over 6 clients" in found.card.read_text()
    if isinstance(model, torch.nn.Module):
        with pytest.raises(ExportError, match=r"SmallNet cannot be imported: choose \.pt2 or \.onnx"):
            export(directory, tmp_path / "model.safetensors", model=model, client=1)
    else:
        found = export(directory, tmp_path / "model.safetensors", model=model, client=1)
        where = "tests.helpers.tiny import Tiny" if isinstance(model, str) else "fedfactor.testing.federation import"
        assert f"from {where}" in found.snippet


def test_the_command_line_takes_the_name_of_the_model(directory: Path, tmp_path: Path) -> None:
    words = ["export", str(directory), "-o", str(tmp_path / "model.pt2"), "--client", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "--model package.module:function" in done.stderr
    done = CliRunner().invoke(app, [*words, "--model", "tests.helpers.tiny:Tiny"])
    assert done.exit_code == 0 and "model.pt2" in done.stdout, done.stderr


def test_a_method_of_your_own_is_recorded_by_where_it_is(tmp_path: Path) -> None:
    run(Unregistered(), rounds=1, directory=tmp_path)
    table = tomllib.loads((tmp_path / "recipe.toml").read_text())["method"]
    assert table == {"name": f"{__name__}:Unregistered", "share": 0.5}
    (group,) = report([tmp_path], tmp_path / "report.html")
    assert group.method == f"{__name__}:Unregistered"


@dataclasses.dataclass(frozen=True)
class Unregistered(FedAvg):
    share: float = 0.5
    nothing: float | None = None
