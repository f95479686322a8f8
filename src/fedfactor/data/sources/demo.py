"""Digits that are in the package: real data without a download.

They are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine Learning
Repository, 1998, doi:10.24432/C50P49, license CC BY 4.0), as scikit-learn distributes it too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfactor.data.dataset import Dataset
from fedfactor.data.sources.files import read_idx
from fedfactor.registry import register
from fedfactor.rng import numpy_rng


@register("data", "digits")
def digits(folder: Path, test_share: float = 0.2, split_seed: int = 0) -> Dataset:
    """The 1,797 images of 8 x 8 digits that come with this package; a share of them is the test set."""
    if not 0 < test_share < 1:
        raise ValueError(f"test_share must lie between 0 and 1, got {test_share:g}")
    here = Path(__file__).parent
    images, labels = read_idx(here / "digits-images.idx.gz", 3), read_idx(here / "digits-labels.idx.gz", 1)
    # Not `images[:, None]`: of its strides torch concludes that channels come last, which costs copies.
    images, labels = images.reshape(-1, 1, 8, 8), labels.astype(np.int64)
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
