"""Batches of any structure: arguments of models, targets, moving to a type, outlines."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from fedfactor.data.batches import arguments, filled, like, outline, targets_of

X, Y = torch.ones(2, 3), torch.tensor([0, 1])


def test_how_a_model_is_called() -> None:
    assert arguments((X, Y)) == ((X,), {}) and arguments([X, Y]) == ((X,), {}) and arguments(X) == ((X,), {})
    assert arguments(((X, Y), Y)) == (((X, Y),), {})
    assert arguments({"x": X, "labels": Y}) == ((), {"x": X, "labels": Y})


def test_where_targets_are() -> None:
    for batch in ((X, Y), [X, Y], {"x": X, "labels": Y}, {"target": Y}):
        assert targets_of(batch) is Y
    for batch, words in (
        (X, r"second part of a tuple \(inputs, targets\)"),
        ({"x": X, "y": Y}, "keys labels, label, targets, target; its keys are x, y"),
    ):
        with pytest.raises(ValueError, match=f"a batch must have a tensor of targets .*{words}"):
            targets_of(batch)


def test_all_tensors_move_and_only_real_numbers_change_their_type() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {"x": [X, (X, Y)], "name": "text", "packed": packed}
    moved = like(batch, torch.zeros((), dtype=torch.float64))
    assert moved["x"][0].dtype == moved["x"][1][0].dtype == torch.float64 and moved["x"][1][1].dtype == torch.int64
    assert moved["name"] == "text" and isinstance(moved["packed"], PackedSequence)
    assert isinstance(moved["x"], list) and isinstance(moved["x"][1], tuple)


def test_an_outline_stands_for_batches_of_any_size() -> None:
    found = json.loads(json.dumps(outline({"x": (X[:1], Y[:1]), "name": "text"})))
    made = filled(found, 5)
    assert made["x"][0].shape == (5, 3) and made["x"][1].dtype == torch.int64 and made["name"] is None
