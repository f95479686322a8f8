"""From a recipe to its data, its model and the facts about them."""

from __future__ import annotations

import json

import pytest

from fedfactor.runs.directory import RunError
from fedfactor.runs.tasks import model_factory, model_options, task_of
from tests.helpers.recipes import recipe


def test_a_model_that_is_none_says_so() -> None:
    with pytest.raises(RunError, match=r"model 'os:getcwd' should build a torch\.nn\.Module, got a str"):
        model_factory({"name": "os:getcwd"}, 10)()


def test_the_data_tell_the_classes_and_a_capacity_the_width() -> None:
    assert model_options({"name": "digits_cnn"}, 7) == {"classes": 7, "width": 1.0}
    assert model_options({"name": "digits_cnn", "classes": 3, "width": 0.5}, 7) == {"classes": 3, "width": 0.5}
    assert model_options({"name": "torch.nn:Linear", "in_features": 4, "out_features": 2}, 7) == {
        "in_features": 4, "out_features": 2,
    }  # fmt: skip


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
