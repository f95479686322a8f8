"""Building the task of a recipe: data, partition and model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedfactor.data import counts, federated
from fedfactor.data import load as load_data
from fedfactor.data.batches import outline
from fedfactor.data.clients import FederatedData
from fedfactor.data.records import Records
from fedfactor.nn import Tune
from fedfactor.protocol.setup import Setup
from fedfactor.registry import imported
from fedfactor.runs.directory import RunError
from fedfactor.runs.peft import with_adapter
from fedfactor.runs.recipe import Recipe
from fedfactor.runs.sections import WEIGHTS, Table, builder_of, metrics_of
from fedfactor.runs.weights import with_weights
from fedfactor.support.hub import local_folder
from fedfactor.task import Task

Facts = dict[str, Any]
"""The contents of `task.json`."""


def setup_of(recipe: Recipe, task: Task) -> Setup:
    """Return the setup of a recipe, which server and clients share."""
    parts = (recipe.method, recipe.optimizer, recipe.codec, recipe.training, recipe.attack, recipe.privacy)
    return Setup(task, *parts)


def facts_with_base(facts: Facts, setup: Setup) -> Facts:
    """Return the facts about a task with the SHA-256 of the model's frozen base, if it has one."""
    return facts | ({"base_sha256": setup.base_sha256} if setup.base_sha256 else {})


def may_have_base(recipe: Recipe) -> bool:
    """Return whether the model can have a frozen base, which is known for sure only when it is built."""
    return "tune" in recipe.tables or ":" in recipe.tables["model"]["name"]


def task_of(recipe: Recipe, data_dir: Path | str | None = None) -> tuple[Task, Facts]:
    """Load a recipe's data, partition it and build the task; return it with facts for use without the data."""
    if recipe.from_python:
        raise RunError(
            "the run was started from Python, so its data cannot be loaded: they were Python objects. Give them with "
            "load(DIR).rebuilt(Task(model, data))"
        )
    tables = recipe.tables
    dataset = load_data(data_dir=data_dir, **tables["data"])
    data = federated(dataset, **tables["partition"])
    facts = counted_facts(data, kind_of(recipe, dataset.kind), dataset.class_names)
    return task_with(recipe, data, facts), facts


def counted_facts(data: FederatedData, kind: str | None, class_names: Sequence[str]) -> Facts:
    """Return the facts about a task, and which client has how many examples of which class."""
    facts = facts_of(data, kind, class_names)
    targets = data.train.known_targets() if isinstance(data.train, Records) else data.train[1]
    if class_names and targets is not None and targets.dim() == 1:
        facts["examples"] = counts(data, len(class_names), most=COUNTED).tolist()
    return facts


def facts_of(data: FederatedData, kind: str | None, class_names: Sequence[str]) -> Facts:
    """Return the facts about a task that are needed to use its models without the data."""
    if isinstance(data.train, Records):
        first = data.batch(data.train, slice(1))
        shapes: Facts = {"identified_by": data.train.identified_by, "outline": outline(first)}
        shapes |= dict.fromkeys(("input_shape", "input_dtype", "seen_shape", "seen_dtype"))
    else:
        shapes = {
            "input_shape": data.train[0].shape[1:],
            "input_dtype": str(data.train[0].dtype).removeprefix("torch."),
            "seen_shape": data.example.shape,
            "seen_dtype": str(data.example.dtype).removeprefix("torch."),
        }
    return {
        "kind": kind,
        "classes": len(class_names),
        "class_names": class_names,
        "clients": data.clients,
        **shapes,
        "transform": str(data.transform),
    }


def data_without(facts: Facts) -> FederatedData:
    """Return data with the right number of clients, and examples that only have the shape of theirs."""
    if facts["seen_shape"] is None:
        return FederatedData.outlined(facts["clients"], facts["outline"])
    example = torch.zeros(facts["seen_shape"], dtype=getattr(torch, facts["seen_dtype"]))
    return FederatedData.without_examples(facts["clients"], example)


def kind_of(recipe: Recipe, kind: str) -> str:
    """Return the kind of a recipe's task, given that of its data."""
    given = recipe.tables["objective"]
    return given["kind"] or ("custom" if given["loss"] else kind)


def task_with(recipe: Recipe, data: FederatedData, facts: Facts) -> Task:
    """Return a recipe's task with data that are already loaded."""
    factory = model_factory(recipe.tables["model"], facts["classes"], recipe.tune)
    path, metrics = recipe.tables["objective"]["loss"], metrics_of(recipe.tables["evaluate"])
    loss = imported(path) if path else None
    return Task(factory, data, facts["kind"], recipe.rounds.evaluate_batch_size, loss, tune=recipe.tune, **metrics)


COUNTED = 200
"""Largest number of clients whose examples per class are written to `task.json`."""


def model_options(table: Table, classes: int) -> Table:
    """Return the arguments of a recipe's model at full width."""
    parameters = inspect.signature(builder_of(table["name"])).parameters
    ours = {"name", *(key for key in WEIGHTS if key not in parameters)}
    options = {key: value for key, value in table.items() if key not in ours}
    if "classes" in parameters and classes:
        options.setdefault("classes", classes)
    elif (
        "classes" in parameters
        and "classes" not in options
        and parameters["classes"].default is inspect.Parameter.empty
    ):
        raise ValueError(
            "the model needs the number of classes, which the data do not say: set model.classes, or give the dataset "
            "`class_names`"
        )
    if "width" in parameters:
        options.setdefault("width", 1.0)
    if options.get("config") == "":
        options["config"] = local_folder(table.get("pretrained") or "", "config.json")  # the folder has both
    return options


def model_factory(table: Table, classes: int, tune: Tune | None = None) -> Callable[..., nn.Module]:
    """Return a function that builds a recipe's model; it takes `width`, a share of the recipe's, if the model does.

    With `model.pretrained` it has these weights. Tensors that `tune` trains whole may be missing in the file.
    """
    options, builder = model_options(table, classes), builder_of(table["name"])
    path = "" if "pretrained" in inspect.signature(builder).parameters else table.get("pretrained") or ""
    path = local_folder(path, "model.safetensors")  # other formats may run code when they are read

    def built(options: Table) -> nn.Module:
        model = _built(table["name"], builder, options)
        if path:
            fresh = tune.trains if tune else lambda name: False
            with_weights(model, Path(path), fresh, table.get("pretrained_sha256") or "")
        return with_adapter(model, tune) if tune else model

    if "width" in inspect.signature(builder).parameters:
        full = options.pop("width")  # the width at capacity 1
        # At full width 1 pass `width` on unchanged: it may be a `Width`, and a product would round its channels again.
        return lambda width=1.0: built({**options, "width": width if full == 1 else full * width})
    return lambda: built(options)


def _built(name: str, builder: Callable[..., Any], options: Table) -> nn.Module:
    found = builder(**options)
    if not isinstance(found, nn.Module):
        raise RunError(f"model {name!r} should build a torch.nn.Module, got a {type(found).__name__}")
    return found
