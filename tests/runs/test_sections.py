"""Sections of recipes: every mistake is one sentence with the key, the legal words and the nearest; the JSON Schema."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.resources import files
from typing import Any

import pytest

from fedfactor.runs.recipe import RecipeError, override, resolve
from tests.helpers.recipes import BASE

MISTAKES = {
    "trian.lr=1": "there is no key 'trian'; did you mean 'train'? legal are name, seed, data, partition",
    "name=a/b": "name must be usable as the name of a directory, got 'a/b'",
    "train=5": "train should be a table, got 5",
    "paper=5": "paper should be a table, got 5",
    # data
    "data.name=digit": "data: no data set is called 'digit'; did you mean 'digits'? there are ag_news, cifar10",
    "data.name=5": "data.name should be a string, got 5",
    "data.name=huggingface": "data: huggingface needs a name after a colon, such as huggingface:NAME",
    "data.test_shar=1": "there is no key 'data.test_shar'; did you mean 'test_share'? legal are name, test_share, split_seed",
    "data.test_share=x": "data.test_share should be a number, got 'x'",
    "data.split_seed=1.5": "data.split_seed should be a whole number, got 1.5",
    "data.flip=1": "data.flip should be true or false, got 1",
    "data.norm=5": "data.norm should be '', 'none', 'half', 'digits',",
    "data.norm=hlf": "data.norm should be '', 'none', 'half', 'digits', 'mnist', 'fashion-mnist', 'cifar10', 'cifar100', 'cinic10', 'tiny-imagenet', 'imagenet', 'fedpara' or 'flanc' (did you mean 'half'?) or a list, got 'hlf'",
    # partition
    "partition.kind=dir": "partition: no partition is called 'dir'; did you mean 'dirichlet'? there are classes",
    "partition.kind=[1]": "partition.kind should be a string, got [1]",
    "partition.alpa=1": "there is no key 'partition.alpa'; did you mean 'alpha'? legal are kind, clients, alpha, min_examples",
    "partition.clients=2.5": "partition.clients should be a whole number, got 2.5",
    "partition.seed=x": "partition.seed should be a whole number, got 'x'",
    # model
    "model.name=resnet81": "model: no model is called 'resnet81'; did you mean 'resnet8'? there are cnn4",
    "model.widht=1": "there is no key 'model.widht'; did you mean 'width'? legal are name, classes, width",
    "model.width=true": "model.width should be a number, got True",
    "model.name=torch.nn:Linea": "model: 'torch.nn:Linea' cannot be imported as package.module:name: module 'torch.nn' has no attribute 'Linea'",
    "model.name=torch.nn:Linear": "model.in_features is missing and has no default; model.out_features is missing",
    # method, optimizer, codec
    "method.name=fedpar": "method: no method is called 'fedpar'; did you mean 'fedpara'? there are",
    "method.gama=1": "there is no key 'method.gama'; did you mean 'gamma'? legal are name, dense, start, gamma",
    "method.tanh=1": "method.tanh should be true or false, got 1",
    "method.dense=fc": "method.dense should be a list, got 'fc'",
    "optimizer.name=5": "optimizer.name should be a string, got 5",
    "codec={name='topk', share=2.0}": "codec: share must lie in (0, 1], got 2",
    "codec=int8": "codec should be a table, got 'int8'",
    # train, evaluate, capacities, run
    "train.rouns=5": "there is no key 'train.rouns'; did you mean 'rounds'?",
    "train.rounds=five": "train.rounds should be a whole number, got 'five'",
    "train.cohort=x": "train.cohort should be a whole number or a number, got 'x'",
    "train.batch_size=0": "train.batch_size should be at least 1, got 0",
    "train.lr=-1": "train.lr should be at least 0, got -1",
    "train.schedule=cosin": "train.schedule.kind should be 'constant', 'exponential', 'multistep', 'cosine' or 'one_cycle' (did you mean 'cosine'?), got 'cosin'",
    "train.epochs=-0.5": "train.epochs should be a whole number or at least 0, got -0.5",
    "train.optimizer=adamm": "train.optimizer: no local optimizer is called 'adamm'; did you mean 'adam'? there are sgd, adam, adamw, adagrad, rmsprop, and package.module:Class",
    "train.optimizer=3": "train.optimizer should be a table or a name, got 3",
    "train.optimizer.betas=[0.9, 0.99]": "there is no key 'train.optimizer.betas'; legal are name, lr, momentum, dampening, weight_decay, nesterov, keep_state",
    "train.optimizer={name='torch.optim:Adadelta', roh=1.0}": "there is no key 'train.optimizer.roh'; did you mean 'rho'?",
    "train.optimizer={name='adam', betas=[0.9]}": "train.optimizer.betas.1 is missing and has no default",
    "train.optimizer.name=torch.nn:Linear": "train.optimizer: 'torch.nn:Linear' is no local optimizer: derive a class from torch.optim.Optimizer",
    "train.optimizer.keep_state=1": "train.optimizer.keep_state should be true or false, got 1",
    "train.schedule.decay=-1": "train.schedule.decay should be at least 0, got -1",
    "train.dtype=float8": "train.dtype should be 'float32', 'float64' or 'bfloat16' (did you mean 'float64'?), got 'float8'",
    "train.device=gpu": "train.device must be cpu, cuda, cuda:1, mps, xpu or another device of torch, got 'gpu'",
    "train.device=meta": "train.device must be cpu",
    "evaluate.clients=sel": "evaluate.clients should be 'none', 'selected' or 'all' (did you mean 'selected'?), got 'sel'",
    "capacities.levels=[1.0, 0.5]": "capacities must have levels that differ, and one share per level, got {'levels': [1.0, 0.5]}",
    "run.keep_rounds=5": "run.keep_rounds should be a list, got 5",
    "run.keep_rounds=[-1]": "run.keep_rounds.0 should be at least 0, got -1",
    "capacities.levels=[1.5]": "capacities.levels.0 should be at most 1, got 1.5",
    "capacities.shares=[0.0]": "capacities.shares.0 should be greater than 0, got 0.0",
    "train.cohort=1.5": "train.cohort should be a whole number or at most 1, got 1.5",
    "train.lr=nan": "train.lr should be a finite number, got nan",
    "train.lr=2020-01-01": "train.lr should be a number, got datetime.date(2020, 1, 1)",
    "train.schedule.dcay=1": "there is no key 'train.schedule.dcay'; did you mean 'decay'? legal are kind, decay",
    "train.schedule=5": "train.schedule should be a table, got 5",
    "method={name='flanc', bases={conv1=[1]}}": "method.bases.conv1.1 is missing and has no default",
    "method.dense=[1]": "method.dense.0 should be a string, got 1",
    "seed=x": "seed should be a whole number, got 'x'",
    "run.keep_rounds=[3, 11]": "run.keep_rounds should be at most train.rounds, 10, got [11]",
}


@pytest.mark.parametrize("assignment", MISTAKES)
def test_mistakes_are_one_sentence(assignment: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"base.toml (cell): {MISTAKES[assignment]}")) as caught:
        resolve(override(BASE, [assignment]), "base.toml (cell)")
    assert "\n" not in str(caught.value)


RENAMED = {
    "train.batch=5": "train.batch is now train.batch_size",
    "train.clip=5": "train.clip is now train.max_grad_norm",
    "train={batch=5, clip=1.0}": "train.batch is now train.batch_size; train.clip is now train.max_grad_norm",
    "partition.least=5": "partition.least is now partition.min_examples",
    "partition={kind='classes', k=2}": "partition.k is now partition.classes_per_client",
    "partition={kind='shards', shards=2}": "partition.shards is now partition.shards_per_client",
    "partition={kind='iid', shards=2}": "there is no key 'partition.shards'; did you mean",  # iid has no such option
    "data={name='shakespeare', least=5}": "data.least is now data.min_examples",
}


@pytest.mark.parametrize("assignment", RENAMED)
def test_old_names_of_keys_are_refused_with_the_new_name(assignment: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"x: {RENAMED[assignment]}")):
        resolve(override(BASE, [assignment]), "x")


def test_a_name_is_needed_where_there_is_no_default() -> None:
    for section in ("data", "model"):
        with pytest.raises(RecipeError, match=f"x: {section}.name is missing and has no default"):
            resolve({key: table for key, table in BASE.items() if key != section}, "x")


def table(rows: int, wide: int = 5, scale: Any = None, names: tuple[str, ...] = ("a", "b"), **others: Any) -> None:
    """Stands for a function that returns a data set."""


def net(layers: list[int], width: float, activation: Any = print, *, json: str = "", **others: Any) -> None:
    """Stands for a function that returns a network."""


def test_options_of_functions_are_their_parameters() -> None:
    own = ["data.name=tests.runs.test_sections:table", "model.name=tests.runs.test_sections:net"]
    with pytest.raises(RecipeError, match=r"data\.rows is missing and has no default"):
        resolve(override(BASE, own))
    with pytest.raises(RecipeError, match=r"data\.wide should be a whole number, got 'x'"):
        resolve(override(BASE, [*own, "data.rows=30", "data.wide=x"]))
    tables = resolve(override(BASE, [*own, "data.rows=30", "data.more=[1]", "model.layers=[3, 4]"])).tables
    pictures = {"norm": "", "crop": 0, "flip": False, "rotate": 0.0}
    # What TOML cannot write, or what the function may have as it likes, is left to the function.
    assert tables["data"] == {"name": "tests.runs.test_sections:table", "rows": 30, "wide": 5, "more": [1], **pictures}
    assert tables["model"] == {"name": "tests.runs.test_sections:net", "layers": [3, 4], "json": ""}
    assert resolve(override(BASE, ["data={name='imdb', words=10}"])).tables["data"] == {
        "name": "imdb", "words": 10, "length": 500, "tokenizer": "", "pool": False, "pool_train": 37500, "pool_seed": 0, "partial": False,
        **pictures,
    }  # fmt: skip


SCHEMA = files("fedfactor.runs") / "recipe.schema.json"


def test_the_schema_in_the_package_is_up_to_date() -> None:
    """In a process of its own: here, other tests may have registered more."""
    command = [sys.executable, "-m", "fedfactor", "recipes", "schema"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == SCHEMA.read_text(), "fedfactor recipes schema > src/fedfactor/runs/recipe.schema.json"


def test_the_schema_has_all_sections_names_limits_and_descriptions() -> None:
    shipped = json.loads(SCHEMA.read_text())
    assert list(shipped["properties"]) == [
        "name", "seed", "data", "partition", "objective", "model", "method", "optimizer", "codec", "tune", "train",
        "capacities", "fleet", "rounds", "aggregation", "attack", "privacy", "evaluate", "run", "paper", "small", "sweep",
    ]  # fmt: skip
    assert all(section["description"] for section in shipped["properties"].values())
    assert not shipped["additionalProperties"] and not shipped["$defs"]["method-fedpara"]["additionalProperties"]
    assert shipped["$defs"]["TrainTable"]["properties"]["batch_size"] == {
        "default": 32, "description": "Examples per batch.", "minimum": 1, "type": "integer",
    }  # fmt: skip
    methods = [shipped["$defs"][one["$ref"].rpartition("/")[2]] for one in shipped["properties"]["method"]["anyOf"]]
    assert {"fedavg", "fedpara", "flanc"} <= {one["properties"]["name"].get("const") for one in methods}
    partitions = [one for name, one in shipped["$defs"].items() if name.startswith("partition-")]
    described = [
        field
        for one in methods + partitions
        for name, field in one["properties"].items()
        if name not in ("name", "kind")
    ]
    assert len(described) > 100 and all(field["description"] for field in described)
    norm = shipped["$defs"]["data-digits"]["properties"]["norm"]["anyOf"][0]
    assert {"", "half", "digits"} <= set(norm["enum"])
