"""The digits, which need no download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfactor.data import load
from fedfactor.rng import numpy_rng


def test_digits_are_those_of_scikit_learn(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    raw, data = load_digits(), load("digits", tmp_path)
    order = numpy_rng(0, "split").permutation(1797)
    assert np.array_equal(np.concatenate([data.test[0], data.train[0]])[:, 0], raw.images[order])
    assert np.array_equal(np.concatenate([data.test[1], data.train[1]]), raw.target[order])


def test_digits_need_nothing(tmp_path: Path) -> None:
    data = load("digits", tmp_path / "nowhere")
    assert data.train[0].shape == (1438, 1, 8, 8)
    assert data.train[0].max() == 16
    assert not (tmp_path / "nowhere").exists()
