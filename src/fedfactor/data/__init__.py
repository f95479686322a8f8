"""Data sets, and how they are split over clients."""

from fedfactor.data.dataset import Dataset, Datasets
from fedfactor.data.federated import federated
from fedfactor.data.show import counts, draw
from fedfactor.data.sources import MissingData, load
from fedfactor.data.splitting import dirichlet, iid
from fedfactor.data.transform import NORMS, ImageTransform, Tokens

__all__ = [
    "NORMS",
    "Dataset",
    "Datasets",
    "ImageTransform",
    "MissingData",
    "Tokens",
    "counts",
    "dirichlet",
    "draw",
    "federated",
    "iid",
    "load",
]
