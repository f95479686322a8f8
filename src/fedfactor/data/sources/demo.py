"""The digits inside scikit-learn: real data that needs no files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from fedfactor.data.dataset import Dataset
from fedfactor.data.sources.files import optional
from fedfactor.registry import register
from fedfactor.rng import numpy_rng


@register("data", "digits")
def digits(folder: Path, test_share: float = 0.2, split_seed: int = 0) -> Dataset:
    """The 8 x 8 digits that come with scikit-learn: 1,797, of which a share becomes the test set."""
    if not 0 < test_share < 1:
        raise ValueError(f"test_share must lie between 0 and 1, got {test_share:g}")
    rows = _rows()
    order = numpy_rng(split_seed, "split").permutation(len(rows))
    cut = int(len(order) * test_share)
    images, labels = rows[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
    test, train = order[:cut], order[cut:]
    return Dataset(
        "digits",
        (images[train], labels[train]),
        (images[test], labels[test]),
        tuple("0123456789"),
        norm="digits",
    )


def _rows() -> np.ndarray:
    """Return 64 pixels and a label a row, from scikit-learn's own file: importing the package takes a second or two."""
    found = importlib.util.find_spec("sklearn")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.exists():
            return np.loadtxt(path, delimiter=",")
    raw = optional("sklearn.datasets", "demo", "the digits data set").load_digits()  # or say what to install
    return np.column_stack([raw.data, raw.target])
