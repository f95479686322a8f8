"""The digits inside scikit-learn: real data that needs no files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfactor.data.dataset import Dataset
from fedfactor.data.sources.files import optional
from fedfactor.data.sources.registry import source
from fedfactor.rng import numpy_rng


@source("digits")
def digits(folder: Path, test_share: float = 0.2, split_seed: int = 0) -> Dataset:
    """The 8 x 8 digits that come with scikit-learn: 1,797, of which a share becomes the test set."""
    if not 0 < test_share < 1:
        raise ValueError(f"test_share must lie between 0 and 1, got {test_share:g}")
    raw = optional("sklearn.datasets", "demo", "the digits data set").load_digits()
    order = numpy_rng(split_seed, "split").permutation(len(raw.target))
    cut = int(len(order) * test_share)
    images, labels = raw.images.astype(np.uint8)[:, None], raw.target.astype(np.int64)
    test, train = order[:cut], order[cut:]
    return Dataset(
        "digits",
        (images[train], labels[train]),
        (images[test], labels[test]),
        tuple("0123456789"),
        norm="digits",
    )
