"""Data sets: which arrays they accept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedfactor.data import Dataset


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (np.zeros((3, 8, 8), np.uint8), np.zeros(3, np.int64), r"N x C x H x W.*got uint8 of shape \(3, 8, 8\)"),
        (np.zeros((3, 8)), np.zeros(3), "targets of train must be int64, or the kind regression or custom"),
        ([[0.0]] * 3, np.zeros(3, np.int64), "must be numpy arrays"),
    ],
)
def test_arrays_that_no_network_reads(inputs: Any, targets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dataset("mine", (inputs, targets), (inputs, targets), ("a",))
