"""What pyproject.toml declares is what the package imports, and the version has one source."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

import fedfactor
from benchmarks.shape import totals

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedfactor"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRA_OF = {
    "flower": "flower",
    "report": "report",
    "figures.py": "figures",
    "export": "onnx",
    "audit": "audit",
    "accounting.py": "privacy",
}
"""The extra that provides what a module, or the modules below a folder, import at their own risk."""
DISTRIBUTIONS = {"PIL": "pillow", "mlflow": "mlflow-skinny"}
"""Distributions of imported modules where the names differ by more than a hyphen."""


def declared(requirements: list[str]) -> set[str]:
    """Return the names of requirements, without versions and extras."""
    return {re.split(r"[\[<>=~! ;]", requirement)[0].lower() for requirement in requirements}


CORE = declared(PROJECT["dependencies"])
EXTRAS = {name: declared(found) for name, found in PROJECT["optional-dependencies"].items()}


def distribution(module: str) -> str:
    return DISTRIBUTIONS.get(module, module.replace("_", "-")).lower()


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield each third-party module that a file imports, with the extra that an `optional` import names."""
    for node in ast.walk(ast.parse(path.read_text())):
        found: list[str] = []
        extra: str | None = None
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                found = [module]
            case ast.Call(func=ast.Name(id="optional"), args=[ast.Constant(str(module)), ast.Constant(str(extra)), *_]):
                found = [module]
        for top in {name.partition(".")[0] for name in found} - {"fedfactor"} - sys.stdlib_module_names:
            yield top, extra


@functools.cache
def everything() -> dict[tuple[str, str | None], set[str]]:
    found = defaultdict(set)
    for path in sorted(SOURCE.rglob("*.py")):
        for one in imports(path):
            found[one].add(path.relative_to(SOURCE).as_posix())
    return dict(found)


def test_imports_are_found_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(
        "import os, a.b\nfrom c.d import e\nfrom . import f\nfrom fedfactor import g\n"
        "def h():\n    import i\n    optional('j.k', 'images', 'h')\n"
    )
    assert set(imports(path)) == {("a", None), ("c", None), ("i", None), ("j", "images")}


@pytest.mark.parametrize(("module", "extra"), list(everything()))
def test_every_import_is_declared(module: str, extra: str | None) -> None:
    wanted = distribution(module)
    for file in everything()[module, extra]:
        given = (
            CORE | EXTRAS[extra]
            if extra
            else CORE
            | {
                name
                for place in (Path(file), *Path(file).parents)
                for name in EXTRAS.get(EXTRA_OF.get(place.name, ""), ())
            }
        )
        assert wanted in given, f"{file} imports {module}, but no requirement that it may rely on provides it"


def test_every_core_dependency_is_imported() -> None:
    assert {distribution(module) for module, _ in everything()} >= CORE


def test_names_of_distributions_are_right() -> None:
    known = packages_distributions()
    checked = {module for module, _ in everything() if module in known}
    assert {"torch", "numpy", "tomli_w"} <= checked
    for module in checked:
        assert distribution(module) in {name.lower().replace("_", "-") for name in known[module]}, module


def test_dependencies_are_pinned_for_development() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    named = re.search(r"fedfactor\[(.*?)\]", " ".join(PROJECT["optional-dependencies"]["dev"]))
    assert named is not None
    brought = set().union(*(EXTRAS[name] for name in named[1].split(",")))
    assert CORE | brought | EXTRAS["dev"] - {"fedfactor"} <= pinned


def test_the_version_has_one_source() -> None:
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", fedfactor.__version__)
    assert fedfactor.__version__ in (ROOT / "CHANGELOG.md").read_text()
    others = [ROOT / "CITATION.cff", ROOT / "README.md"]
    assert not [path.name for path in others if fedfactor.__version__ in path.read_text()]


def test_workflows_and_hooks_run_what_there_is() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").iterdir()}
    assert workflows["ci"]["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    steps = [step for flow in workflows.values() for job in flow["jobs"].values() for step in job["steps"]]
    called = {word for step in steps for call in re.findall(r"make (.*)", step.get("run", "")) for word in call.split()}
    assert {"lint", "types", "test", "docs", "test-wheel"} <= called <= targets
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert hooks["repo"] == "local"
    tools = {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks["hooks"]}
    assert tools <= EXTRAS["dev"]


def test_the_source_tree_keeps_its_shape() -> None:
    found = totals()
    assert found["modules_at_the_root"] <= 8, "put a new module into the layer that it belongs to"
    assert found["hooks_of_a_method"] <= 20 and found["type_checking_files"] <= 5
    assert not found["methods_over_120"]
