"""Recipes: what is legal, and that every mistake is one sentence with the key, the legal words and the nearest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedfactor.runs.recipe import RecipeError, Table, cells, overridden_cells, override, read, resolve, small

BASE: Table = {
    "name": "base",
    "data": {"name": "digits"},
    "partition": {"kind": "dirichlet", "clients": 20},
    "model": {"name": "digits_cnn"},
    "method": {"name": "fedpara"},
}

MISTAKES = {
    "trian.lr=1": "there is no key 'trian'; did you mean 'train'? legal are name, seed, data, partition",
    "name=a/b": "name should be a word that can name a directory, got 'a/b'",
    "train=5": "train must be a section, got 5",
    "paper=5": "paper must be a section, got 5",
    # data
    "data.name=digit": "data: no data set is called 'digit'; did you mean 'digits'? there are ag_news, cifar10",
    "data.name=5": "data.name: should be a word, got 5",
    "data.name=huggingface": "data: huggingface needs a name after a colon, such as huggingface:NAME",
    "data.test_shar=1": "there is no key 'data.test_shar'; did you mean 'test_share'? legal are test_share, split_seed",
    "data.test_share=x": "data.test_share: should be a valid number, got 'x'",
    "data.split_seed=1.5": "data.split_seed: should be a valid integer, got 1.5",
    "data.flip=1": "data.flip: should be a valid boolean, got 1",
    "data.norm=5": "data.norm: should be a valid string or a list, got 5",
    "data.norm=hlf": "data.norm: should be one of none, half, digits",
    # partition
    "partition.kind=dir": "partition: no partition is called 'dir'; did you mean 'dirichlet'? there are classes",
    "partition.kind=[1]": "partition.kind: should be a word, got [1]",
    "partition.alpa=1": "there is no key 'partition.alpa'; did you mean 'alpha'? legal are seed, take, train_share",
    "partition.clients=2.5": "partition.clients: should be a valid integer, got 2.5",
    "partition.seed=x": "partition.seed: should be a valid integer, got 'x'",
    # model
    "model.name=resnet81": "model: no model is called 'resnet81'; did you mean 'resnet8'? there are cnn4",
    "model.widht=1": "there is no key 'model.widht'; did you mean 'width'? legal are classes, width",
    "model.width=true": "model.width: should be a valid number, got True",
    "model.name=torch.nn:Linea": "model.name 'torch.nn:Linea' cannot be imported",
    "model.name=torch.nn:Linear": "model.in_features is missing: torch.nn:Linear has no default for it",
    # method, optimizer, codec
    "method.name=fedpar": "method: no method is called 'fedpar'; did you mean 'fedpara'? there are",
    "method.gama=1": "there is no key 'method.gama'; did you mean 'gamma'? legal are dense, gamma",
    "method.tanh=1": "method.tanh: should be a valid boolean, got 1",
    "method.dense=fc": "method.dense: should be a list, got 'fc'",
    "optimizer.name=5": "optimizer.name: should be a word, got 5",
    "codec={name='topk', share=2.0}": "codec: share must lie in (0, 1], got 2",
    "codec=int8": "codec must be a section, got 'int8'",
    # train, evaluate, capacities, run
    "train.rouns=5": "there is no key 'train.rouns'; did you mean 'rounds'?",
    "train.rounds=five": "train.rounds: should be a valid integer, got 'five'",
    "train.cohort=x": "train.cohort: should be a valid integer or a valid number, got 'x'",
    "train.batch_size=0": "train: batch must be a whole number, at least 1, got 0",
    "train.lr=-1": "train: lr must be a number, at least 0, got -1",
    "train.schedule=cosin": "train.schedule.kind: should be 'constant', 'exponential', 'multistep' or 'cosine' (did you",
    "train.schedule.decay=-1": "train.schedule: decay must be a number, at least 0, got -1",
    "train.dtype=float8": "train: dtype must be one of float32, float64, bfloat16, got 'float8'",
    "train.device=gpu": "train: device must be cpu, cuda, cuda:1, mps, xpu or another that torch has, got 'gpu'",
    "train.device=meta": "train: device must be cpu",
    "evaluate.clients=sel": "evaluate.clients: should be 'none', 'selected' or 'all' (did you mean 'selected'?), got",
    "evaluate.target=80": "evaluate: target must be a number, in [0, 1], got 80",
    "capacities.levels=[1.0, 0.5]": "capacities.levels must differ, and capacities.shares have one value for each",
    "run.keep_rounds=5": "run.keep_rounds: should be a list, got 5",
    "run.keep_rounds=[3, 11]": "run.keep_rounds: should be rounds between 0 and train.rounds, 10, got [3, 11]",
}


@pytest.mark.parametrize("assignment", MISTAKES)
def test_mistakes_are_one_sentence(assignment: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"base.toml (cell): {MISTAKES[assignment]}")) as caught:
        resolve(override(BASE, [assignment]), "base.toml (cell)")
    assert "\n" not in str(caught.value)


def test_a_name_is_needed_where_there_is_no_default() -> None:
    for section in ("data", "model"):
        with pytest.raises(RecipeError, match=f"x: {section}.name is missing: it says which {section} to take"):
            resolve({key: table for key, table in BASE.items() if key != section}, "x")


def test_combinations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(RecipeError, match="scaffold keeps tensors on the client, but the basis of fedhm turns"):
        resolve(override(BASE, ["method.name=fedhm", "optimizer.name=scaffold"]))


def test_every_default_is_written_out() -> None:
    tables = resolve(BASE).tables
    assert tables["train"]["momentum"] == 0.0 and tables["train"]["cohort"] == 1.0
    assert tables["data"] == {
        "name": "digits", "test_share": 0.2, "split_seed": 0, "norm": "", "crop": 0, "flip": False, "rotate": 0.0,
    }  # fmt: skip
    assert tables["partition"]["alpha"] == 0.5 and tables["partition"]["take"] == 0
    assert tables["method"] == {"name": "fedpara", "dense": [], "gamma": 0.1, "tanh": False, "jacobian": 0.0}
    assert resolve({**BASE, "model": {"name": "vgg16"}}).tables["model"] == {
        "name": "vgg16", "groups": 2, "dropout": 0.5, "channels": 3,
    }  # fmt: skip
    assert tables["optimizer"] == {"name": "fedavg"} and tables["codec"] == {"name": "float32"}


def test_a_schedule_can_be_one_word_and_a_norm_two_lists() -> None:
    resolved = resolve(override(BASE, ["train.schedule=cosine", "data.norm=[[0.5], [0.25]]"]))
    assert resolved.tables["train"]["schedule"]["kind"] == "cosine"
    assert resolved.tables["data"]["norm"] == [[0.5], [0.25]]


@pytest.mark.parametrize("assignment", ["train.rounds", "=5", "train.=5", ".rounds=5", "train..rounds=5"])
def test_overrides_need_a_key_and_a_value(assignment: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"--set takes section.key=value, got {assignment!r}")):
        override(BASE, [assignment])


def test_overrides_of_values_as_if_they_were_sections() -> None:
    with pytest.raises(RecipeError, match="name is a value, not a section"):
        override(BASE, ["name.x=5"])


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 5), ("0.5", 0.5), ("true", True), ("[1, 2]", [1, 2]), ("word", "word"), ("'5'", "5"), ("a=b", "a=b")],
)
def test_overrides_are_toml_or_plain_words(text: str, value: Any) -> None:
    assert override({}, [f"paper.x={text}"]) == {"paper": {"x": value}}


def test_seeds_of_partition_and_training_are_separate() -> None:
    resolved = resolve({**BASE, "seed": 7})
    assert resolved.training.seed == resolved.tables["train"]["seed"] == 7
    assert resolved.tables["partition"]["seed"] == 0
    with pytest.raises(RecipeError, match=r"seed and train\.seed are the same setting"):
        resolve(override(BASE, ["seed=1", "train.seed=5"]))


# Sweeps.

CASES = [{"name": "one", "method": {"name": "fedavg"}}, {"name": "two", "train": {"lr": 0.5}}]


def test_a_sweep_is_the_product_of_lists_and_cases() -> None:
    found = cells({**BASE, "sweep": {"train.lr": [0.1, 0.2], "seed": [0, 1], "cases": CASES}})
    assert list(found) == [
        f"{case}-lr={lr}-seed={seed}" for case in ("one", "two") for lr in (0.1, 0.2) for seed in (0, 1)
    ]
    assert found["one-lr=0.2-seed=1"]["train"] == {"lr": 0.2}
    assert found["two-lr=0.1-seed=0"]["method"] == {"name": "fedpara"}
    assert cells({**BASE, "sweep": {"train": {"lr": [1]}}}) == cells({**BASE, "sweep": {"train.lr": [1]}})
    assert list(cells(BASE)) == ["base"]
    with pytest.raises(RecipeError, match="is a sweep of 2 cells; take one of them"):
        resolve({**BASE, "sweep": {"cases": CASES}})


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (5, "maps keys to lists"),
        ({"train.lr": 0.1}, "maps keys to lists"),
        ({"cases": [1]}, "are overlays, each with a name"),
        ({"cases": [{"name": 5}]}, "are overlays, each with a name"),
        ({"cases": [CASES[0], CASES[0]]}, "needs a name of its own: 'one' is none, or taken"),
        ({"cases": [{"seed": 1}]}, "needs a name of its own: '' is none, or taken"),
        ({"seed": []}, "stands for no cell at all"),
        ({"seed": [1, 1]}, "'seed=1' is none, or taken"),
    ],
    ids=str,
)
def test_sweeps_that_make_no_sense(sweep: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        overridden_cells({**BASE, "sweep": sweep}, [])


def test_overrides_reach_every_cell_but_not_what_is_swept() -> None:
    tables = {**BASE, "sweep": {"train.lr": [0.1, 0.2], "cases": CASES}}
    found = overridden_cells(tables, ["method.name=local", "train.rounds=3"])
    assert {cell["method"]["name"] for cell in found.values()} == {"local"}
    with pytest.raises(RecipeError, match=r"the sweep varies train\.lr; choose cells with --only"):
        overridden_cells(tables, ["train.lr=1"])
    assert list(overridden_cells(tables, ["sweep.train.lr=[3]"])) == ["one-lr=3", "two-lr=3"]


def test_names_of_cells_name_directories() -> None:
    (name,) = cells({**BASE, "sweep": {"data.name": ["huggingface:a/b"]}})
    assert "/" not in name


# Files.


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    for there, message in ((path, "there is no recipe"), (tmp_path, "there is no recipe")):
        with pytest.raises(RecipeError, match=message):
            read(there)
    for content in (b"name = ", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(RecipeError, match=r"a\.toml is not TOML"):
            read(path)


def test_small() -> None:
    tables = small({**BASE, "small": {"train": {"rounds": 2}}})
    assert tables["train"]["rounds"] == 2 and "small" not in tables
    with pytest.raises(RecipeError, match=r"no \[small\] section"):
        small(BASE)
