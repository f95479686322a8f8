"""IMDB and AG News as token ids."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from fedfactor.data import MissingData, load


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
    data = load("imdb", tmp_path, partial=True, words=3, length=5)
    # film 4, bad 3, then a and good 2 each: the alphabet decides
    assert data.vocabulary == ("", "film", "bad", "a")
    assert data.kind == "binary"
    np.testing.assert_array_equal(data.train[1], [0, 0, 1, 1])
    np.testing.assert_array_equal(data.train[0], [[0, 2, 2, 1, 2], [0, 0, 0, 3, 1], [0, 3, 0, 1, 0], [0, 0, 0, 0, 1]])
    np.testing.assert_array_equal(data.test[0][0], [0, 0, 2, 0, 0])
    assert data.test[0].shape == (3, 5)


def test_imdb_pooled(tmp_path: Path) -> None:
    imdb(tmp_path)
    data = load("imdb", tmp_path, partial=True, pool=True, pool_train=5)
    assert data.train[0].shape == (5, 500)
    assert sorted(data.train[1]) == [0, 0, 1, 1, 1]
    assert len(data.test[1]) == 2
    again = load("imdb", tmp_path, partial=True, pool=True, pool_train=5, pool_seed=1)
    assert not np.array_equal(np.asarray(again.train[0]), np.asarray(data.train[0]))
    with pytest.raises(ValueError, match="between 0 and the number of reviews, 7, got 37,500"):
        load("imdb", tmp_path, partial=True, pool=True)


def test_imdb_damages(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"aclImdb_v1\.tar\.gz"):
        load("imdb", tmp_path, partial=True)
    imdb(tmp_path)
    (tmp_path / "aclImdb" / "test" / "pos" / "0_7.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"0_7\.txt is damaged: expected UTF-8 text"):
        load("imdb", tmp_path, partial=True)


def test_ag_news(tmp_path: Path) -> None:
    place = tmp_path / "ag_news_csv"
    place.mkdir()
    (place / "train.csv").write_text('"3","Oil up","Oil ""soars""\\today"\n"1","","oil, again"\n')
    (place / "test.csv").write_text('"4","Robots","oil oil oil oil oil"\n')
    data = load("ag_news", tmp_path, partial=True, vocabulary=4, length=4)
    assert data.vocabulary == ("", "?", "oil", "again")
    np.testing.assert_array_equal(data.train[0], [[2, 1, 2, 1], [2, 3, 0, 0]])
    np.testing.assert_array_equal(data.train[1], [2, 0])
    np.testing.assert_array_equal(data.test[0], [[1, 2, 2, 2]])
    assert data.class_names == ("World", "Sports", "Business", "Sci/Tech")
    for bad in ('"5","a","b"\n', '"1","a"\n', '"x","a","b"\n', '"1","a","b'):
        (place / "test.csv").write_text('"4","fine","text"\n' + bad)
        with pytest.raises(ValueError, match=r"test\.csv is damaged"):
            load("ag_news", tmp_path, partial=True)


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tokenizer makes of texts is tested in tests/third_party/test_peft.py."""
    imdb(tmp_path)
    with pytest.raises(ValueError, match=r"data.tokenizer: there is no .*model/tokenizer.json; name the folder of a"):
        load("imdb", tmp_path, partial=True, tokenizer=str(tmp_path / "model"))
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"data.tokenizer needs tokenizers: .*\[tune\]"):
        load("imdb", tmp_path, partial=True, tokenizer=str(tmp_path))
