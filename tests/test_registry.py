"""What other packages add through entry points is found, listed and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import fedfactor
from fedfactor import models, registry
from fedfactor.data import federated, load
from fedfactor.data.sources import info
from fedfactor.engines import Pool
from fedfactor.methods import FedAvg
from fedfactor.registry import create, register
from fedfactor.runs import compare, loggers
from fedfactor.runs.execute import run as execute
from tests.helpers import tiny
from tests.helpers.recipes import TABLES, recipe

SOURCE = Path(fedfactor.__file__).parents[1]
MODULE = '''
from dataclasses import dataclass, field
from fedfactor.methods import FedAvg
from fedfactor.registry import described, register

@register("methods", "mine", paper="none")
@dataclass(frozen=True)
class Mine(FedAvg):
    """Mine."""

    level: int = field(default=3, metadata=described("how much"))
'''


def test_an_installed_package_adds_a_method(tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(MODULE)
    info = tmp_path / "my_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedfactor.methods]\nmine = my_methods\n")
    done = subprocess.run(
        [sys.executable, "-c", "from fedfactor.cli import main; main()", "methods", "--json"],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}", "PATH": ""},
    )  # fmt: skip
    mine = next(row for row in json.loads(done.stdout) if row["name"] == "mine")
    assert mine["fields"] == [{"name": "level", "type": "int", "default": 3, "help": "how much"}]


def test_a_name_is_taken_once_and_classes_are_frozen_dataclasses() -> None:
    with pytest.raises(ValueError, match="'fedavg' is already registered by"):

        @register("methods", "fedavg")
        @dataclass(frozen=True)
        class Other(FedAvg):
            pass

    with pytest.raises(TypeError, match="must be a frozen dataclass"):

        @register("methods", "loose")
        class Loose:
            pass


# Other packages, installed for real: a folder on the path with their entry points.

PLUGINS = '''
from dataclasses import dataclass

import numpy as np
from torch import nn

from fedfactor.data import Dataset
from fedfactor.data.partitions import Iid
from fedfactor.methods import FedAvg
from fedfactor.optimizers import FedProx
from fedfactor.protocol.codecs import Float16
from fedfactor.registry import register


for kind, base in {"methods": FedAvg, "optimizers": FedProx, "codecs": Float16, "partitions": Iid}.items():
    register(kind, "theirs")(dataclass(frozen=True)(type("Theirs" + kind, (base,), {"__doc__": "Theirs."})))


def network(size: int = 3) -> nn.Module:
    """A network without the decorator."""
    return nn.Linear(size, size)


@register("data", "theirs", fetch="cp somewhere {data}")
def examples(folder):
    """Nine rows."""
    return Dataset("theirs", (np.ones((9, 2)), np.zeros(9, np.int64)), (np.ones((0, 2)), np.zeros(0, np.int64)), ("a",))


class Notes:
    def __init__(self, directory, name, recipe):
        self.directory = directory
'''
TARGETS = {
    "methods": "their_plugins", "optimizers": "their_plugins", "codecs": "their_plugins", "partitions": "their_plugins",
    "models": "their_plugins:network", "data": "their_plugins", "loggers": "their_plugins:Notes",
}  # fmt: skip
LAZY = ("models", "data", "loggers")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Install a distribution with one entry point for each kind, pointing to a module of this text."""
    for kind, known in registry._table.items():
        registry.entries(kind)
        monkeypatch.setitem(registry._table, kind, dict(known))

    def write(text: str) -> None:
        (tmp_path / "their_plugins.py").write_text(text)
        info = tmp_path / "their_plugins-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-plugins\nVersion: 1.0\n")
        groups = [f"[fedfactor.{kind}]\ntheirs = {target}\n" for kind, target in TARGETS.items()]
        (info / "entry_points.txt").write_text("\n".join(groups))
        monkeypatch.syspath_prepend(tmp_path)
        registry._plugins.cache_clear()

    yield write
    sys.modules.pop("their_plugins", None)
    registry._plugins.cache_clear()


@pytest.mark.parametrize("kind", TARGETS)
def test_plugins_of_all_kinds_are_found(kind: str, install: Callable[[str], None]) -> None:
    before = registry.names(kind)
    install(PLUGINS)
    assert registry.names(kind) == sorted([*before, "theirs"])
    assert registry.names(kind, "their*") == ["theirs"]
    assert ("their_plugins" in sys.modules) == (kind not in LAZY)  # names of these are known without an import
    entry = registry.get(kind, "theirs")
    assert entry.origin.startswith("their_plugins.") and registry.entries(kind)["theirs"] == entry


def test_plugins_are_used_by_name(install: Callable[[str], None], tmp_path: Path) -> None:
    install(PLUGINS)
    result = fedfactor.simulate(
        models.build("theirs", size=2), federated(load("theirs"), "theirs", clients=3, test_share=0.4),
        method="theirs", optimizer="theirs", codec="theirs", rounds=1,
    )  # fmt: skip
    assert type(result.federation.setup.method).__module__ == "their_plugins"
    assert info("theirs").fetch == "cp somewhere {data}"
    loggers.check(["theirs"])


@pytest.mark.parametrize("kind", TARGETS)
def test_a_broken_plugin_is_blamed_on_its_distribution(kind: str, install: Callable[[str], None]) -> None:
    install("raise RuntimeError('no such library')")
    with pytest.raises(ImportError, match="entry point 'theirs' of their-plugins cannot be loaded: no such library"):
        registry.get(kind, "theirs")
    if kind in LAZY:  # whoever asks for something else does not notice
        assert "theirs" in registry.names(kind) and registry.get(kind, registry.names(kind)[0])


def test_an_entry_point_that_registers_nothing(install: Callable[[str], None]) -> None:
    install("")
    with pytest.raises(ImportError, match="their_plugins registers no data set 'theirs', and is no function or class"):
        registry.get("data", "theirs")


# `package.module:name` needs no registration.


OWN = '''
from dataclasses import dataclass
from fedfactor.methods import FedAvg, Method
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.optimizer import Optimizer

@dataclass(frozen=True)
class Doubled(Method):
    """A method of their own."""
    power: float = 1.0
    def weight(self, reply):
        return reply.samples ** self.power

@dataclass(frozen=True)
class Halfway(Optimizer):
    share: float = 0.5
    def step(self, step):
        return {name: old + self.share * (step.mean[name] - old) for name, old in step.server.items()}, step.state

@dataclass(frozen=True)
class Rounded(Codec):
    digits: int = 2
    def up(self, weights, reference, state, rng):
        return {name: weight.round(decimals=self.digits) for name, weight in weights.items()}, {}

class Undecorated(FedAvg):
    power: float = 1.0

@dataclass(frozen=True)
class Bare(Method):
    power: float

def function(): pass
'''
PARTS = {"method": "Doubled", "optimizer": "Halfway", "codec": "Rounded"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module into the current folder, which is not on Python's path; return its name."""
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    return name


def test_own_classes_in_the_current_folder_are_used_by_path(own: str) -> None:
    by_path = {section: f"{own}:{cls}" for section, cls in PARTS.items()}
    written = [f"{section}.name={path}" for section, path in by_path.items()]
    chosen = recipe(*written, "method.power=0.5", "optimizer.share=0.25", "codec.digits=3", "train.rounds=1")
    assert str(chosen.method) == "Doubled(power=0.5)" and str(chosen.optimizer) == "Halfway(share=0.25)"
    assert chosen.tables["method"] == {"name": f"{own}:Doubled", "power": 0.5}
    assert chosen.method.name == f"{own}:Doubled"  # in messages
    assert execute(chosen).summary["totals"]["failures"] == 0
    simulated = fedfactor.simulate(tiny.Tiny, tiny.data(), **by_path, rounds=1, cohort=2)  # type: ignore[arg-type]
    assert simulated.summary["totals"]["failures"] == 0
    assert fedfactor.create_method(f"{own}:Doubled", power=0.5) == chosen.method
    cells = compare.cells(TABLES, ["fedavg", f"{own}:Doubled"], [1], Path("side"))
    assert [type(cell.recipe.method).__name__ for cell in cells] == ["FedAvg", "Doubled"]


def test_own_classes_reach_worker_processes(own: str) -> None:
    chosen = recipe(*(f"{section}.name={own}:{cls}" for section, cls in PARTS.items()), "train.rounds=1")
    with Pool(1) as pool:
        assert execute(chosen, engine=pool).summary["weights_sha256"] == execute(chosen).summary["weights_sha256"]


def test_classes_that_are_not_of_the_kind_are_refused(own: str) -> None:
    for kind, cls, reason in [
        ("methods", "function", "is no method: derive a class from fedfactor.protocol.method.Method"),
        ("methods", "Rounded", "is no method: derive a class from fedfactor.protocol.method.Method"),
        ("codecs", "Doubled", "is no codec: derive a class from fedfactor.protocol.codecs.Codec"),
        ("methods", "Undecorated", "is no method: Undecorated must be a frozen dataclass"),
        ("methods", "Bare", r"is no method: Bare\.power needs a default"),
        ("optimizers", "Nothing", "cannot be imported as package.module:name: module '.*' has no attribute 'Nothing'$"),
    ]:
        with pytest.raises(ValueError, match=f"'{own}:{cls}' {reason}"):
            registry.create(kind, f"{own}:{cls}")
    with pytest.raises(
        ValueError, match=r"No module named 'nowhere_at_all'\. On each machine of the run, it must be in"
    ):
        registry.create("methods", "nowhere_at_all:Method")


def test_functions_in_the_current_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in_this_folder.py").write_text("def net(): return 'a network'\nnumber = 3\nimport nowhere_at_all_2\n")
    (tmp_path / "in_that_folder.py").write_text("def net(): return 'a network'\nnumber = 3\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    assert registry.imported("in_that_folder:net")() == "a network"
    for path, reason in {
        "in_this_folder:net": "No module named 'nowhere_at_all_2'",
        "in_that_folder:number": "it is a int, not a function or class",
        "in_that_folder:nothing": "has no attribute 'nothing'",
        "nowhere_at_all:net": "No module named 'nowhere_at_all'",
        ":net": "Empty module name",
    }.items():
        with pytest.raises(ValueError, match=f"'{path}' cannot be imported as package.module:name: .*{reason}"):
            registry.imported(path)


def test_unknown_names_and_fields_say_what_there_is() -> None:
    with pytest.raises(ValueError, match="did you mean 'fedpara'"):
        create("methods", "fedparra")
    with pytest.raises(ValueError, match="did you mean 'gamma'"):
        create("methods", "fedpara", gama=0.1)
