"""Every recipe under recipes/: parsed, resolved, and two rounds of it on a stand-in for its data."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedfactor import recipe as recipes
from fedfactor.run import run
from tests.data import make

ROOT = Path(__file__).parents[1]
PATHS = sorted((ROOT / "recipes").rglob("*.toml"))
NAMES = [str(path.relative_to(ROOT / "recipes")) for path in PATHS]

SMALL = ["partition.clients=2", "partition.take=0", "train.rounds=2", "train.cohort=1", "train.epochs=1"]
SMALLER = {"shakespeare": ["data.roles=2", "data.least=100", "train.batch=500"]}


def _tried() -> dict[str, list[str]]:
    """Of every recipe one cell, and all that have a method that their model has not been tried with yet."""
    seen: set[tuple[str, ...]] = set()
    tried: dict[str, list[str]] = {}
    for name, path in zip(NAMES, PATHS, strict=True):
        for cell, tables in recipes.cells(recipes.read(path)).items():
            parts = tuple(tables.get(key, {}).get("name", "") for key in ("model", "method"))
            if parts not in seen or name not in tried:
                tried.setdefault(name, []).append(cell)
            seen.add(parts)
    return tried


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a few random examples of every data set that a recipe names."""
    folder = tmp_path_factory.mktemp("data")
    make.cifar10(folder, each=2)
    make.cifar100(folder)
    make.cinic10(folder)
    make.mnist(folder / "MNIST" / "raw")
    make.femnist(folder / "femnist" / "all_data_0.json", {f"writer{n}": [n, 61 - n] * 5 for n in range(10)})
    make.shakespeare(folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_resolves_and_reads_back_the_same(name: str) -> None:
    tables = recipes.read(ROOT / "recipes" / name)
    assert tables["name"] == Path(name).stem
    for cell, one in recipes.cells(tables).items():
        resolved = recipes.resolve(one, cell)
        assert recipes.resolve(tomllib.loads(resolved.to_toml()), cell) == resolved
        assert resolved.tables["paper"] or name == "demo.toml"


@pytest.mark.parametrize(("name", "cell"), [(name, cell) for name, cells in _tried().items() for cell in cells])
def test_two_rounds_on_a_stand_in(name: str, cell: str, stand_in: Path) -> None:
    tables = recipes.cells(recipes.read(ROOT / "recipes" / name))[cell]
    resolved = recipes.resolve(recipes.override(tables, [*SMALL, *SMALLER.get(tables["data"]["name"], [])]), name)
    summary = run(resolved, data_dir=stand_in).summary
    assert summary["rounds"] == 2 and summary["totals"]["failures"] == 0
    assert 0 <= next(summary[key]["final"] for key in ("global", "all") if key in summary) <= 1


def test_every_table_and_figure_that_is_trained_has_a_recipe() -> None:
    # Tables 1 and 5 are counts (`fedfactor tables`), Table 6 is in every recipe, Figures 1, 2 and 6 are of no training.
    first_lines = " ".join((ROOT / "recipes" / name).read_text().partition("\n")[0] for name in NAMES)
    for words in ("Table 2 (a)", "Tables 2 (b) and 11", "Table 3", "Table 4", "Tables 7 and 8", "Table 9", "Table 10"):
        assert words in first_lines
    for words in (
        "Table 12",
        "Figures 3 and 7",
        "Figure 4",
        "Figure 5 (a)",
        "Figure 5 (b)",
        "Figure 5 (c)",
        "Figure 8",
    ):
        assert words in first_lines
