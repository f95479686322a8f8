"""Recipes of the package by name: found, described and run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedfactor.runs import catalog
from tests.helpers.command import fedfactor


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_packaged_recipe_has_a_name_and_one_sentence() -> None:
    names = catalog.names()
    assert len(names) == len(list(catalog.RECIPES.rglob("*.toml"))) and {"demo", "fedpara/table12"} <= set(names)
    for name in names:
        assert catalog.find(Path(name)) == catalog.packaged(name)
        sentence = catalog.description(name)
        assert 20 < len(sentence) < 250 and sentence[0] != "#" and "\n" not in sentence, name
    assert catalog.description("fedpara/figure5c").endswith("repetitions.")  # "Sec. 3.1" does not end a sentence


def test_a_file_of_that_name_comes_first(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()  # a folder is no recipe
    assert catalog.find(Path("demo")) == catalog.RECIPES / "demo.toml"
    (tmp_path / "demo").rmdir()
    (tmp_path / "demo").write_text("name = 'mine'")
    assert catalog.find(Path("demo")) == Path("demo")


@pytest.mark.parametrize("wrong", ["dmo", "recipes/demo.toml"])
def test_a_wrong_name_is_answered_with_the_nearest(wrong: str) -> None:
    with pytest.raises(ValueError, match=rf"no file {wrong}, and .*did you mean 'demo'\?.*`fedfactor recipes` lists"):
        catalog.find(Path(wrong))


def test_commands_take_names(tmp_path: Path) -> None:
    words = ["run", "demo", "--only", "fedpara", "--set", "train.rounds=1", "--set", "train.epochs=1", "--quiet"]
    done = fedfactor(*words, "--set", "partition.clients=5")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "runs" / "demo" / "fedpara" / "summary.json").exists()
    assert "20 clients" in fedfactor("data", "show", "demo").stdout
