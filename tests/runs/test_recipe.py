"""Recipes: defaults, overrides, sweeps and files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfactor.data import federated, load
from fedfactor.runs.recipe import RecipeError, cells, overridden_cells, override, read, resolve, small
from tests.helpers.recipes import BASE


def test_combinations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(RecipeError, match="scaffold keeps tensors on the client, but the basis of fedhm changes"):
        resolve(override(BASE, ["method.name=fedhm", "optimizer.name=scaffold"]))


def test_every_default_is_written_out() -> None:
    tables = resolve(BASE).tables
    assert tables["train"]["momentum"] == 0.0 and tables["train"]["cohort"] == 1.0
    assert tables["data"] == {
        "name": "digits", "test_share": 0.2, "split_seed": 0, "norm": "", "crop": 0, "flip": False, "rotate": 0.0,
    }  # fmt: skip
    assert tables["partition"]["alpha"] == 0.5 and tables["partition"]["take"] == 0
    assert tables["method"] == {
        "name": "fedpara", "dense": [], "start": "random", "gamma": 0.1, "tanh": False, "jacobian": 0.0, "rank": 0,
    }  # fmt: skip
    assert resolve({**BASE, "model": {"name": "vgg16"}}).tables["model"] == {
        "name": "vgg16", "groups": 2, "dropout": 0.5, "channels": 3, "planes": 64,
    }  # fmt: skip
    assert tables["optimizer"] == {"name": "fedavg"} and tables["codec"] == {"name": "float32"}


def test_a_resolved_partition_is_complete_and_splits_the_same() -> None:
    table = resolve(override(BASE, ["partition={kind='dirichlet', clients=5, alpha=0.3}"])).tables["partition"]
    assert table == {
        "kind": "dirichlet", "seed": 0, "take": 0, "train_share": 1.0, "own_test": True, "test_share": 0.2,
        "test_limit": 0, "validation_share": 0.0, "evaluate_on": "test", "clients": 5, "alpha": 0.3, "min_examples": 2, "tries": 100,
    }  # fmt: skip
    short, full = federated(load("digits"), "dirichlet", clients=5, alpha=0.3), federated(load("digits"), **table)
    assert all(a.equal(b) for a, b in zip(short.train_of, full.train_of, strict=True))


def test_the_local_optimizer_is_written_out_and_reads_back() -> None:
    """Options may stand in [train] or in [train.optimizer]; the resolved recipe has each of them once."""
    assert resolve(BASE).tables["train"]["optimizer"] == {
        "name": "sgd", "keep_state": False, "dampening": 0, "nesterov": False,
    }  # fmt: skip
    long = resolve(
        override(BASE, ["train.optimizer={name='adamw', lr=0.01, betas=[0.9, 0.95]}", "train.local_steps=3"])
    )
    short = resolve(override(BASE, ["train.optimizer.name=adamw", "train.lr=0.01", "train.local_steps=3"]))
    train = long.tables["train"]
    assert (train["lr"], train["weight_decay"], train["momentum"], train["local_steps"]) == (0.01, 0.01, 0.0, 3)
    assert train["optimizer"] == {
        "name": "adamw",
        "keep_state": False,
        "amsgrad": False,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
    }
    assert "epochs" not in train and short.tables["train"]["lr"] == 0.01
    assert resolve(long.tables).training == long.training and resolve(long.tables).tables == long.tables
    named = resolve(override(BASE, ["train.optimizer=torch.optim:RAdam"])).training
    assert named.lr == 0.001 and named.local_optimizer.torch_class is torch.optim.RAdam


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
    with pytest.raises(RecipeError, match="is a sweep of 2 cells; choose one of them"):
        resolve({**BASE, "sweep": {"cases": CASES}})


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (5, "maps keys to lists"),
        ({"train.lr": 0.1}, "maps keys to lists"),
        ({"cases": [1]}, "should be a table of overlays whose name is a string"),
        ({"cases": [{"name": 5}]}, "should be a table of overlays whose name is a string"),
        ({"cases": [CASES[0], CASES[0]]}, "needs a name of its own: 'one' is empty or used twice"),
        ({"cases": [{"seed": 1}]}, "needs a name of its own: '' is empty or used twice"),
        ({"seed": []}, "has no cells"),
        ({"seed": [1, 1]}, "'seed=1' is empty or used twice"),
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


def test_the_rounds_between_evaluations_are_written_out() -> None:
    found = resolve(override(BASE, ["train.rounds=100"])).tables["evaluate"]
    assert (found["every"], found["batch_size"]) == (5, 100)
    assert resolve(override(BASE, ["train.rounds=100", "evaluate.every=1"])).rounds.evaluate_every == 1


def test_privacy_is_left_out_or_written_out_and_reads_back() -> None:
    assert "privacy" not in resolve(BASE).tables and resolve(BASE).privacy is None
    found = resolve(override(BASE, ["privacy={clip=1, epsilon=8.0, delta=1e-5}"]))
    assert found.tables["privacy"] == {
        "clip": 1.0, "delta": 1e-5, "kind": "gaussian", "epsilon": 8.0, "where": "server", "sampling": "poisson",
        "quantile": 0.5, "clip_start": 0.1, "clip_lr": 0.2,
    }  # fmt: skip
    assert resolve(found.tables).privacy == found.privacy
    with pytest.raises(RecipeError, match=r"privacy.delta"):
        resolve(override(BASE, ["privacy={clip=1.0, noise=1.0}"]))
    with pytest.raises(RecipeError, match="give either noise, or epsilon"):
        resolve(override(BASE, ["privacy={clip=1.0, delta=1e-5}"]))
    with pytest.raises(RecipeError, match="clients of scaffold upload a second update"):
        resolve(override(BASE, ["privacy={clip=1.0, noise=1.0, delta=1e-5}", "optimizer.name=scaffold"]))
