"""Shakespeare and FEMNIST as LEAF prepares them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedfactor.data import MissingData, load
from fedfactor.data.sources.leaf import LETTERS, WINDOW
from tests.helpers import made_data as make


def shakespeare(folder: Path, texts: dict[str, str]) -> None:
    place = folder / "shakespeare" / "by_play_and_character"
    place.mkdir(parents=True)
    for role, text in texts.items():
        (place / f"{role}.txt").write_text(text)
    (folder / "shakespeare" / "users_and_plays.json").write_text(json.dumps(dict.fromkeys(texts, "A PLAY")))


def test_shakespeare_windows(tmp_path: Path) -> None:
    assert len(LETTERS) == len(set(LETTERS)) == 80
    first, second = "To be,   or not\nto be: " * 5, "é" + "x" * 90 + "\n"
    shakespeare(tmp_path, {"A_HAMLET": first, "A_SILENT": "Ay.\n", "B_FOOL": second})
    data = load("shakespeare", tmp_path, partial=True)
    assert data.owners == ("A_HAMLET", "B_FOOL")
    assert data.train_ids is not None
    clean = ["To be, or not to be: " * 5, " " + "x" * 90 + " "]
    for role, text in enumerate(clean):
        rows = np.flatnonzero(data.train_ids == role)
        # Every line ends in a space, which is one with the space before it.
        text = text.rstrip() + " "
        assert len(rows) == len(text) - WINDOW
        for start, row in enumerate(rows):
            assert "".join(LETTERS[i] for i in data.train[0][row]) == text[start : start + WINDOW]
            assert LETTERS[data.train[1][row]] == text[start + WINDOW]
    assert data.kind == "language"
    assert data.train[0].dtype == np.uint8
    assert len(load("shakespeare", tmp_path, partial=True, roles=1).owners) == 1
    with pytest.raises(ValueError, match="only 2 roles have at least 2 windows, but roles is 3"):
        load("shakespeare", tmp_path, partial=True, roles=3)


def test_shakespeare_damages(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"TalwalkarLab/leaf"):
        load("shakespeare", tmp_path, partial=True)
    shakespeare(tmp_path, {"A": "short"})
    with pytest.raises(ValueError, match="expected more than 80 characters"):
        load("shakespeare", tmp_path, partial=True)
    (tmp_path / "shakespeare" / "users_and_plays.json").write_text('{"A": ')
    with pytest.raises(ValueError, match=r"users_and_plays\.json is damaged: expected JSON"):
        load("shakespeare", tmp_path, partial=True)


def test_femnist_whole(tmp_path: Path) -> None:
    place = tmp_path / "femnist" / "data" / "all_data"
    first = make.femnist(place / "all_data_0.json", {"f1": [0, 61], "f2": [10]})
    second = make.femnist(place / "all_data_1.json", {"f3": [5, 5, 5]}, seed=1)
    data = load("femnist", tmp_path)
    assert data.owners == ("f1", "f2", "f3")
    assert data.classes == 62
    assert data.train_ids is not None
    np.testing.assert_array_equal(data.train_ids, [0, 0, 1, 2, 2, 2])
    np.testing.assert_array_equal(data.train[1], [0, 61, 10, 5, 5, 5])
    np.testing.assert_array_equal(data.train[0][:2].reshape(2, -1), first["f1"])
    np.testing.assert_array_equal(data.train[0][3:].reshape(3, -1), second["f3"])
    assert data.test[0].shape == (0, 1, 28, 28)


def test_femnist_split_shares_writers(tmp_path: Path) -> None:
    make.femnist(tmp_path / "femnist" / "train" / "a_train.json", {"f1": [1, 2], "f2": [3]})
    make.femnist(tmp_path / "femnist" / "test" / "a_test.json", {"f2": [3], "f1": [1]})
    data = load("femnist", tmp_path)
    assert data.test_ids is not None
    np.testing.assert_array_equal(data.test_ids, [1, 0])
    assert data.owners == ("f1", "f2")


@pytest.mark.parametrize(
    "text",
    [
        '{"users": ["a"',
        '{"users": ["a"]}',
        '{"users": ["a"], "user_data": {"a": {"x": [[0.5, 1]], "y": [1]}}}',
        json.dumps({"users": ["a"], "user_data": {"a": {"x": [[2.0] * 784], "y": [1]}}}),
        json.dumps({"users": ["a"], "user_data": {"a": {"x": [[0.0] * 784], "y": [62]}}}),
        '{"users": [], "user_data": {}}',
    ],
)
def test_femnist_damages(tmp_path: Path, text: str) -> None:
    path = tmp_path / "femnist" / "all_data_0.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=r"all_data_0\.json is damaged: expected"):
        load("femnist", tmp_path)
