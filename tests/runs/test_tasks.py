"""From a recipe to its data, its model and the facts about them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import Tensor, nn

from fedfactor.runs.directory import RunError
from fedfactor.runs.recipe import RecipeError, resolve
from fedfactor.runs.tasks import model_factory, model_options, task_of
from fedfactor.task import Decider
from tests.helpers.recipes import TABLES, recipe


def test_a_model_that_is_none_says_so() -> None:
    with pytest.raises(RunError, match=r"model 'os:getcwd' should build a torch\.nn\.Module, got a str"):
        model_factory({"name": "os:getcwd"}, 10)()


def test_the_data_tell_the_classes_and_a_capacity_the_width() -> None:
    assert model_options({"name": "digits_cnn"}, 7) == {"classes": 7, "width": 1.0}
    assert model_options({"name": "digits_cnn", "classes": 3, "width": 0.5}, 7) == {"classes": 3, "width": 0.5}
    assert model_options({"name": "torch.nn:Linear", "in_features": 4, "out_features": 2}, 7) == {
        "in_features": 4, "out_features": 2,
    }  # fmt: skip


def demanding(classes: int) -> nn.Module:
    return nn.Linear(4, classes)


def test_data_that_do_not_tell_the_classes_leave_the_models_default() -> None:
    assert model_options({"name": "digits_cnn"}, 0) == {"width": 1.0}
    assert model_options({"name": f"{__name__}:demanding", "classes": 2}, 0) == {"classes": 2}
    with pytest.raises(ValueError, match=r"which the data do not say: set model.classes, or give the dataset"):
        model_options({"name": f"{__name__}:demanding"}, 0)


def test_widths_are_shares_of_the_recipes() -> None:
    def parameters(**table: float) -> int:
        build = model_factory({"name": "digits_cnn", **table}, 10)
        return sum(p.numel() for p in build(0.5).parameters())

    half = sum(p.numel() for p in model_factory({"name": "digits_cnn", "width": 0.5}, 10)().parameters())
    assert parameters() == half > parameters(width=0.5)


def test_facts_are_enough_to_use_a_model_without_the_data() -> None:
    task, facts = task_of(recipe())
    written = json.loads(json.dumps(facts))
    assert (written["kind"], written["classes"], written["clients"]) == ("classification", 10, 6)
    assert written["input_shape"] == written["seen_shape"] == [1, 8, 8]
    assert (written["input_dtype"], written["seen_dtype"]) == ("uint8", "float32")
    assert [sum(counts) for counts in written["examples"]] == [len(part) for part in task.data.train_of]


F1 = {"name": "torchmetrics.classification:MulticlassF1Score", "num_classes": 10, "average": "macro"}


def scaled(outputs: Tensor, batch: Any, factor: float = 1.0) -> Tensor:
    return factor * (outputs.argmax(1) == batch[1])


def test_a_recipe_names_metrics_with_their_options() -> None:
    own = {"plain": f"{__name__}:scaled", "twice": {"name": f"{__name__}:scaled", "factor": 2.0}, "f1": F1}
    found = resolve({**TABLES, "evaluate": {"metrics": own, "best": "f1"}})
    assert found.tables["evaluate"]["metrics"]["f1"] == F1
    task, _ = task_of(found)
    assert task.decider == Decider("f1", higher_is_better=True) and task.data.central is not None
    scores = task.evaluate(task.build(), task.data.central)
    assert scores["plain"] == pytest.approx(scores["accuracy"]) == pytest.approx(scores["twice"] / 2)


@pytest.mark.parametrize(
    ("metric", "sentence"),
    [
        ("nix", "evaluate.metrics: there is no built-in metric 'nix'"),
        ("nix:nix", "evaluate.metrics: 'nix:nix' cannot be imported"),
        ({"num_classes": 3}, "evaluate.metrics: m: only a metric that is named as package.module:name takes options"),
        ({**F1, "average": "median"}, "evaluate.metrics: m: MulticlassF1Score refuses its options: .*average"),
        (3, r"evaluate.metrics\.?"),
    ],
)
def test_a_wrong_metric_of_a_recipe_is_refused_before_data_are_loaded(metric: Any, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        resolve({**TABLES, "evaluate": {"metrics": {"m": metric}}})
