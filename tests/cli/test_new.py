"""`fedfactor new`: what it writes works as it is."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest

from fedfactor import registry
from fedfactor.cli.new import write_new
from fedfactor.registry import create
from fedfactor.testing import check_method
from fedfactor.testing.promises import never_sends_private_tensors
from tests.helpers.command import fedfactor


def test_a_new_method_passes_the_conformance_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = fedfactor("new", "method", "fresh_idea", cwd=tmp_path)
    assert "wrote fresh_idea.py; next: python fresh_idea.py" in written.stdout, written.stderr
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry._table, "methods", dict(registry._table["methods"]))
    method = importlib.import_module("fresh_idea").FreshIdea
    check_method(method())
    never_sends_private_tensors(method(keeps="fc"))
    assert create("methods", "fresh_idea", strength=0.1) == method(strength=0.1)
    del sys.modules["fresh_idea"]


def test_a_new_method_runs_as_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(registry._table, "methods", dict(registry._table["methods"]))
    runpy.run_path(str(write_new("method", "fresh_idea", tmp_path)), run_name="__main__")
    assert capsys.readouterr().out.startswith("FreshIdea(keeps='', strength=0.001) after 10 rounds")


def test_a_new_recipe_runs_without_any_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("PIL", "datasets", "flwr", "jinja2", "onnx", "plotly", "sklearn", "tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it raises
    written = fedfactor("new", "recipe", "my-first", cwd=tmp_path)
    assert "wrote my-first.toml; next: fedfactor run my-first.toml" in written.stdout, written.stderr
    done = fedfactor("run", "my-first.toml", "--small", "--quiet", cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    summary = json.loads((tmp_path / "runs" / "my-first" / "summary.json").read_text())
    assert summary["rounds"] == 2 and summary["failures"] == 0


def test_what_a_recipe_shows_in_comments_is_legal(tmp_path: Path) -> None:
    """Every line that is commented out is a line of a legal recipe: its first word is a key, or a section."""
    from fedfactor.runs.recipe import cells, read, resolve, small

    text = write_new("recipe", "all", tmp_path).read_text()
    shown = []
    for line in text.splitlines():
        bare = line.removeprefix("# ")
        commented = line.startswith("# ") and (bare.startswith("[") or bare.partition(" = ")[0].isidentifier())
        shown.append(bare if commented else line)
    full = "\n".join(shown).replace('name = "digits"', 'name = "folder"', 1)
    full = full.replace('name = "folder"\n', "\n")  # given twice: once instead of the digits
    path = tmp_path / "shown.toml"
    path.write_text(full)
    found = cells(small(read(path)))
    assert list(found) == ["dense", "factors"]
    resolved = resolve(found["factors"])
    assert resolved.tables["data"]["path"] == "images" and resolved.method.gamma == 0.3
    assert resolved.tables["capacities"] == {
        "levels": [1.0, 0.5],
        "shares": [0.3, 0.7],
        "dynamic": False,
        "cover": False,
    }


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("method", "My-Method", "lower-case letters, digits and _"),
        ("method", "fedpara", "a method 'fedpara' exists already"),
        ("recipe", "../elsewhere", "is also the name of a directory"),
        ("recipe", "mine.toml", "has no suffix .toml"),
        ("optimizer", "mine", "writes a method or a recipe, got 'optimizer'"),
    ],
)
def test_names_that_cannot_be(kind: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write_new(kind, name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = write_new("recipe", "mine", tmp_path)
    path.write_text("precious")
    with pytest.raises(ValueError, match=r"mine\.toml exists already"):
        write_new("recipe", "mine", tmp_path)
    assert path.read_text() == "precious"
    with pytest.raises(ValueError, match="none does not exist; create it first"):
        write_new("recipe", "mine", tmp_path / "none")
