"""A data set: arrays, the meaning of their targets, and the natural owners of the examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfactor.data.clients import AsStored, Kind
from fedfactor.data.transform import ImageTransform, Tokens, transform

Array = NDArray[Any]
Labels = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs and targets (int64), one row per example, usually memory-mapped.

    Inputs are images (uint8, N x C x H x W), token ids (N x length) or floats of any shape, which networks read as they
    are stored. A data set without a test set has an empty one; `federated` then holds out training examples.
    """

    name: str
    train: tuple[Array, Labels]
    test: tuple[Array, Labels]
    class_names: tuple[str, ...]
    kind: Kind = "classification"
    norm: str | tuple[Sequence[float], Sequence[float]] = "none"
    """Normalisation of pixels: a name in `NORMS`, or mean and standard deviation."""
    crop: int = 0
    """Pixels of padding before training images are cropped at random: see `ImageTransform`."""
    flip: bool = False
    """Whether training images are mirrored at random."""
    rotate: float = 0.0
    """Largest angle, in degrees, by which training images are rotated at random."""
    vocabulary: tuple[str, ...] = ()
    """The tokens by id."""
    train_ids: Labels | None = None
    """The natural owner (a writer, a role) of each training example, as a position in `owners`. -1: not an example."""
    test_ids: Labels | None = None
    owners: tuple[str, ...] = ()
    ordered: bool = False
    """Whether an owner's examples are in order of time. If so, the last ones are held out, not random ones."""
    gap: int = 0
    """Number of examples between training and test examples that overlap with both, and belong to neither."""

    def __post_init__(self) -> None:
        for part, (inputs, targets), ids in (("train", self.train, self.train_ids), ("test", self.test, self.test_ids)):
            if len(inputs) != len(targets) or (ids is not None and len(ids) != len(targets)):
                raise ValueError(f"{self.name}: inputs, targets and ids of {part} differ in length")
            if not isinstance(inputs, np.ndarray) or not isinstance(targets, np.ndarray) or targets.dtype != np.int64:
                raise ValueError(f"{self.name}: inputs and targets of {part} must be numpy arrays, targets int64")
        if not self.images and (self.norm != "none" or self.crop or self.flip or self.rotate):
            raise ValueError(
                f"{self.name} has no images of uint8: it cannot be normalised, cropped, flipped or rotated"
            )
        if not self.images and not self._floats and self.train[0].ndim != 2:
            raise ValueError(
                f"{self.name}: inputs must be images (uint8, N x C x H x W), token ids (N x length) or floats, got "
                f"{self.train[0].dtype} of shape {self.train[0].shape}"
            )
        transform = self.transform  # raises ValueError now rather than in the middle of a run
        if isinstance(transform, ImageTransform) and len(transform.mean) not in (1, self.train[0].shape[1]):
            raise ValueError(
                f"{self.name}: the normalisation {self.norm!r} has {len(transform.mean)} channels, the images have "
                f"{self.train[0].shape[1]}"
            )

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def images(self) -> bool:
        """Whether the inputs are images of uint8."""
        return self.train[0].ndim == 4 and self.train[0].dtype == np.uint8

    @property
    def transform(self) -> ImageTransform | Tokens | AsStored:
        """Turns batches of this data set into what networks read."""
        if self.images:
            return transform(self.norm, crop=self.crop, flip=self.flip, rotate=self.rotate)
        return AsStored() if self._floats else Tokens()

    @property
    def _floats(self) -> bool:
        return np.issubdtype(self.train[0].dtype, np.floating)

    def __str__(self) -> str:
        """One line: sizes, classes, owners."""
        parts = [
            f"{self.name}: {count(self.train_ids, self.train):,} train and {count(self.test_ids, self.test):,} test",
            f"{' x '.join(map(str, self.train[0].shape[1:]))} {self.train[0].dtype}",
            f"{self.classes} classes",
        ]
        if self.owners:
            parts.append(f"{len(self.owners):,} natural owners")
        return ", ".join(parts)


def count(ids: Labels | None, examples: tuple[Array, Labels]) -> int:
    """Return the number of rows that are examples."""
    return len(examples[1]) if ids is None else int((ids >= 0).sum())
