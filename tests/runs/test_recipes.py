"""Every recipe of the package: parsed, resolved, and a round or two of it on a stand-in for its data."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from fedfactor.data.sources import info
from fedfactor.models import EfficientNetLite0
from fedfactor.runs import recipe as recipes
from fedfactor.runs.execute import run
from tests.helpers import made_data as make

RECIPES = Path(__file__).parents[2] / "src" / "fedfactor" / "recipes"
NAMES = [str(path.relative_to(RECIPES)) for path in sorted(RECIPES.rglob("*.toml"))]

FEW = [
    "partition.clients=2", "partition.take=0", "partition.train_share=1.0", "train.cohort=1", "train.epochs=1",
    "run.keep_rounds=[]", "evaluate.every=0",
]  # fmt: skip
FEWER = {
    "shakespeare": ["data.roles=2", "data.min_examples=100", "train.batch_size=500"],
    "imdb": ["data.pool_train=4"],
    "classes": ["partition.classes_per_client=1"],
    "equal-dirichlet": ["partition.size=0"],
    "natural": ["partition.ids_per_client=1"],
    "dirichlet-pair": ["partition.alpha=100.0"],
    "ag_news": ["model.dim=8", "model.hidden=8"],
    "feddecomp": ["train.epochs=2", "method.lora_epochs=1"],
    "fedrep": ["train.epochs=2"],
}
"""What a stand-in of few examples needs, by data set, kind of partition and method."""


def _cells(name: str, small: bool = False) -> dict[str, recipes.Table]:
    tables = recipes.read(RECIPES / name)
    return recipes.cells(recipes.small(tables) if small else {k: v for k, v in tables.items() if k != "small"})


def _has_small(name: str) -> bool:
    return "small" in recipes.read(RECIPES / name)


def _tried() -> list[tuple[str, bool, str]]:
    """Of every recipe one cell, small where it can be, and some more.

    These are small ones whose model has not been tried with their method, and others whose model or method has not been
    tried at all: full-size networks take seconds.
    """
    pairs, single, tried = set[tuple[str, ...]](), set[str](), []
    for name in [name for name in NAMES if not name.startswith("tune/")]:  # they need weights: see below
        for small in (True, False) if _has_small(name) else (False,):
            for number, (cell, tables) in enumerate(_cells(name, small).items()):
                parts = tuple(tables.get(key, {}).get("name", "") for key in ("model", "method"))
                new = parts not in pairs if small else not single.issuperset(parts)
                if new or (number == 0 and small == _has_small(name)):
                    tried.append((name, small, cell))
                pairs.add(parts)
                single.update(parts)
    return tried


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a few random examples of every data set that a recipe names."""
    folder = tmp_path_factory.mktemp("data")
    make.cifar10(folder, each=2)
    make.cifar100(folder, classes=2)  # few: what is tested was trained
    make.cinic10(folder)
    make.tiny_imagenet(folder)
    make.mnist(folder / "MNIST" / "raw")
    make.mnist(folder / "FashionMNIST" / "raw")
    np.savez(folder / "mnist_writers.npz", writer_train=np.arange(20) // 5, writer_test=np.arange(10) // 5 + 9)
    make.femnist(folder / "femnist" / "all_data_0.json", {f"writer{n}": [n, 61 - n] * 5 for n in range(10)})
    make.shakespeare(folder)
    make.imdb(folder)
    make.ag_news(folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_resolves_and_reads_back_the_same(name: str) -> None:
    tables = recipes.read(RECIPES / name)
    assert tables["name"] == name.removesuffix(".toml").replace("/", "-")  # it names the run directory
    for small in (False, True) if _has_small(name) else (False,):
        for cell, one in _cells(name, small).items():
            resolved = recipes.resolve(one, cell)
            assert recipes.resolve(tomllib.loads(resolved.to_toml()), cell) == resolved
            assert resolved.tables["paper"] or name == "demo.toml" or name.startswith("tune/") or small


@pytest.mark.parametrize(("name", "small", "cell"), _tried())
def test_rounds_on_a_stand_in(name: str, small: bool, cell: str, stand_in: Path) -> None:
    """One round of full-size networks: it takes seconds, and what a second round needs does not depend on the size."""
    rounds = 2 if small else 1
    tables = _cells(name, small)[cell]
    kinds = [tables["data"]["name"], tables["partition"]["kind"], tables["method"]["name"]]
    changes = [change for few in (FEW, *(FEWER.get(kind, []) for kind in kinds)) for change in few]
    changes.append(f"train.rounds={rounds}")
    changes += ["capacities.cover=false"] if tables.get("capacities", {}).get("cover") else []  # one client per round
    if "partial" in info(tables["data"]["name"]).options:
        changes.append("data.partial=true")
    if tables["method"].get("jacobian") and name != "fedpara/table10.toml":  # slow: one recipe with it is enough
        changes.append("method.jacobian=0.0")
    summary = run(recipes.resolve(recipes.override(tables, changes), name), data_dir=stand_in).summary
    assert summary["rounds"] == rounds and summary["totals"]["failures"] == 0
    assert 0 <= next(summary[key]["final"] for key in ("global", "all") if key in summary) <= 1


def test_two_rounds_of_fine_tuning_convolutions(stand_in: Path, tmp_path: Path) -> None:
    """The recipes on texts are run in tests/third_party/test_peft.py, because they need transformers."""
    torch.save(EfficientNetLite0(1000).state_dict(), tmp_path / "lite0.pth", _use_new_zipfile_serialization=False)
    tables = recipes.read(RECIPES / "tune" / "cifar10.toml")
    del tables["model"]["pretrained_sha256"]
    changes = [
        *FEW,
        "train.rounds=2",
        f"model.pretrained={tmp_path / 'lite0.pth'}",
        "model.size=32",
        "partition.alpha=100.0",
        "data.partial=true",
    ]
    result = run(recipes.resolve(recipes.override(tables, changes), "tune"), data_dir=stand_in)
    assert result.summary["rounds"] == 2 and "_fc.weight" in result.server.tensors
    assert result.server.tensors["_blocks.3._expand_conv.v"].shape == (8, 24, 1, 1)


# What is trained: other tables are counts (`fedfactor tables`) or settings, other figures drawings.
PRINTED = {
    "fedpara": [
        "Table 2 (a)", "Tables 2 (b) and 11", "Table 3", "Table 4", "Tables 7 and 8", "Table 9", "Table 10", "Table 12",
        "Figures 3 and 7", "Figure 4", "Figure 5 (a)", "Figure 5 (b)", "Figure 5 (c)", "Figure 8",
    ],
    "flanc": [
        *(f"{what}, {data}" for what in ("Table 1", "Figure 3")
          for data in ("CIFAR-10", "CIFAR-100", "Fashion-MNIST", "Shakespeare")),
        "Figure 4", "Figure 5", "Figure 6", "Figure 7",
    ],
    "fedhm": [
        *(f"{what}, {data}" for what in ("Table 2", "Table 3", "Table 8", "Figures 4 and 5", "Figure 6", "Figure 7")
          for data in ("CIFAR-10", "CIFAR-100")),
        "Table 4", "Table 8, Tiny-ImageNet", "Table 9",
    ],
    "prism": [
        "Figures 1 and 6", "Figure 4", "Figure 5", "Figure 7", "Figure 8", "Figure 9", "Figure 10", "Table 2", "Table 3",
        "Table 11",
    ],
    "feddecomp": [
        *(f"{what}, {data}" for what in ("Table 1", "Table 2") for data in ("CIFAR-10", "CIFAR-100", "Tiny-ImageNet")),
        "Table 3", "Table 4", "Table 5", "Table 6", "Table 7", "Table 8", "Table 9, AG News", "Table 9, ImageNet",
        "Figure 5", "Figure 6", "Figure 7", "Figure 8",
    ],
}  # fmt: skip
FULL = {"fedpara": "FedPara", "flanc": "FLANC", "fedhm": "FedHM", "prism": "PriSM", "feddecomp": "FedDecomp"}
SMALL = ("flanc/", "fedhm/", "prism/", "feddecomp/", "fedpara/figure5")


@pytest.mark.parametrize("paper", PRINTED)
def test_every_table_and_figure_that_is_trained_has_a_recipe(paper: str) -> None:
    begins = [(RECIPES / name).read_text() for name in NAMES if name.startswith(f"{paper}/")]
    for words in PRINTED[paper]:
        assert any(re.match(rf"# {FULL[paper]} {re.escape(words)}[:, ]", text) for text in begins), words


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(SMALL)])
def test_recipes_have_a_small_overlay_that_says_what_it_reduces(name: str) -> None:
    assert _has_small(name)
    before = (RECIPES / name).read_text().partition("\n[small")[0]
    assert "# Reduced: " in before.rpartition("\n\n")[2]
    assert len(_cells(name, small=True)) <= len(_cells(name))
