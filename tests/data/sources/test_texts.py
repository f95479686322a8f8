from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedfactor.data import MissingData, load
from fedfactor.data.sources.leaf import LETTERS, WINDOW
from tests.helpers import made_data as make


def imdb(folder: Path) -> None:
    texts = {
        ("train", "neg"): ["Bad, bad film.<br />Bad!", "a film"],
        ("train", "pos"): ["A good film it's", "good film"],
        ("test", "neg"): ["bad unseen words"],
        ("test", "pos"): ["good " * 9, ""],
    }
    for (part, side), reviews in texts.items():
        place = folder / "aclImdb" / part / side
        place.mkdir(parents=True)
        for number, text in enumerate(reviews):
            (place / f"{number}_7.txt").write_text(text)


def test_imdb_counts_words_and_pads_in_front(tmp_path: Path) -> None:
    imdb(tmp_path)
    data = load("imdb", tmp_path, words=3, length=5)
    # film 4, bad 3, then a and good 2 each: the alphabet decides
    assert data.vocabulary == ("", "film", "bad", "a")
    assert data.kind == "binary"
    np.testing.assert_array_equal(data.train[1], [0, 0, 1, 1])
    np.testing.assert_array_equal(data.train[0], [[0, 2, 2, 1, 2], [0, 0, 0, 3, 1], [0, 3, 0, 1, 0], [0, 0, 0, 0, 1]])
    np.testing.assert_array_equal(data.test[0][0], [0, 0, 2, 0, 0])
    assert data.test[0].shape == (3, 5)


def test_imdb_pooled(tmp_path: Path) -> None:
    imdb(tmp_path)
    data = load("imdb", tmp_path, pool=True, pool_train=5)
    assert data.train[0].shape == (5, 500)
    assert sorted(data.train[1]) == [0, 0, 1, 1, 1]
    assert len(data.test[1]) == 2
    again = load("imdb", tmp_path, pool=True, pool_train=5, pool_seed=1)
    assert not np.array_equal(np.asarray(again.train[0]), np.asarray(data.train[0]))
    with pytest.raises(ValueError, match="between 0 and the number of reviews, 7, got 37,500"):
        load("imdb", tmp_path, pool=True)


def test_imdb_damages(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"aclImdb_v1\.tar\.gz"):
        load("imdb", tmp_path)
    imdb(tmp_path)
    (tmp_path / "aclImdb" / "test" / "pos" / "0_7.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"0_7\.txt is damaged: expected UTF-8 text"):
        load("imdb", tmp_path)


def test_ag_news(tmp_path: Path) -> None:
    place = tmp_path / "ag_news_csv"
    place.mkdir()
    (place / "train.csv").write_text('"3","Oil up","Oil ""soars""\\today"\n"1","","oil, again"\n')
    (place / "test.csv").write_text('"4","Robots","oil oil oil oil oil"\n')
    data = load("ag_news", tmp_path, vocabulary=4, length=4)
    assert data.vocabulary == ("", "?", "oil", "again")
    np.testing.assert_array_equal(data.train[0], [[2, 1, 2, 1], [2, 3, 0, 0]])
    np.testing.assert_array_equal(data.train[1], [2, 0])
    np.testing.assert_array_equal(data.test[0], [[1, 2, 2, 2]])
    assert data.class_names == ("World", "Sports", "Business", "Sci/Tech")
    for bad in ('"5","a","b"\n', '"1","a"\n', '"x","a","b"\n', '"1","a","b'):
        (place / "test.csv").write_text('"4","fine","text"\n' + bad)
        with pytest.raises(ValueError, match=r"test\.csv is damaged"):
            load("ag_news", tmp_path)


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
    data = load("shakespeare", tmp_path)
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
    assert len(load("shakespeare", tmp_path, roles=1).owners) == 1
    with pytest.raises(ValueError, match="only 2 roles have at least 2 windows, but roles is 3"):
        load("shakespeare", tmp_path, roles=3)


def test_shakespeare_damages(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"TalwalkarLab/leaf"):
        load("shakespeare", tmp_path)
    shakespeare(tmp_path, {"A": "short"})
    with pytest.raises(ValueError, match="expected more than 80 characters"):
        load("shakespeare", tmp_path)
    (tmp_path / "shakespeare" / "users_and_plays.json").write_text('{"A": ')
    with pytest.raises(ValueError, match=r"users_and_plays\.json is damaged: expected JSON"):
        load("shakespeare", tmp_path)


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
