"""Examples, and how they are split over clients."""

from fedfactor.data.digits import digits
from fedfactor.data.partition import dirichlet, iid

__all__ = ["digits", "dirichlet", "iid"]
