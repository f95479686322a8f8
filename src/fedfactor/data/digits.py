"""The 8 x 8 digits that come with scikit-learn: real data that needs no download."""

from __future__ import annotations

import numpy as np
import torch

from fedfactor.data.clients import FederatedData
from fedfactor.data.splitting import dirichlet, iid
from fedfactor.rng import numpy_rng


def digits(clients: int = 10, *, alpha: float | None = None, seed: int = 0, test_share: float = 0.2) -> FederatedData:
    """Return the digits split over clients, IID or by Dirichlet(alpha), with a central test set.

    A client's own test examples are those of the central set whose labels it has, in its own proportions or fewer.
    """
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(raw.target)
    order = torch.from_numpy(numpy_rng(seed, "split").permutation(len(y)))
    cut = int(len(y) * test_share)
    test, train = order[:cut], order[cut:]
    labels, test_labels = y[train].numpy(), y[test].numpy()
    rng = numpy_rng(seed, "partition")
    parts = iid(labels, clients, rng) if alpha is None else dirichlet(labels, clients, alpha, rng)
    own = [np.flatnonzero(np.isin(test_labels, labels[part])) for part in parts]
    return FederatedData(
        (x[train], y[train]),
        [torch.from_numpy(part) for part in parts],
        (x[test], y[test]),
        [torch.from_numpy(part) for part in own],
    )
