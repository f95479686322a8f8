"""The digits that come with scikit-learn: real data without a download."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfactor.data.dataset import Dataset
from fedfactor.data.sources.files import optional
from fedfactor.registry import register
from fedfactor.rng import numpy_rng


@register("data", "digits")
def digits(folder: Path, test_share: float = 0.2, split_seed: int = 0) -> Dataset:
    """The 1,797 images of 8 x 8 digits that come with scikit-learn; a share of them is the test set."""
    if not 0 < test_share < 1:
        raise ValueError(f"test_share must lie between 0 and 1, got {test_share:g}")
    images, labels = optional("sklearn.datasets", "demo", "the digits data set").load_digits(return_X_y=True)
    images, labels = images.astype(np.uint8).reshape(-1, 1, 8, 8), labels.astype(np.int64)
    order = numpy_rng(split_seed, "split").permutation(len(labels))
    cut = int(len(order) * test_share)
    test, train = order[:cut], order[cut:]
    return Dataset(
        "digits",
        (images[train], labels[train]),
        (images[test], labels[test]),
        tuple("0123456789"),
        norm="digits",
    )
