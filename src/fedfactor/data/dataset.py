"""Data sets: arrays or map-style datasets, the meaning of their targets, and the natural owners of the examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedfactor.data.clients import Arrays, AsStored, Kind
from fedfactor.data.records import Collate, MapStyle, Records
from fedfactor.data.transform import ImageTransform, Tokens, transform

Array = NDArray[Any]
Labels = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs and targets (int64, for regression floats), one row per example, usually memory-mapped.

    Inputs are images (uint8, N x C x H x W), token ids (N x length) or floats of any shape, which networks read as they
    are stored. A data set without a test set has an empty one; `federated` then holds out training examples.
    """

    name: str
    train: tuple[Array, Labels]
    test: tuple[Array, Labels]
    class_names: tuple[str, ...] = ()
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
            if not isinstance(inputs, np.ndarray) or not isinstance(targets, np.ndarray):
                raise ValueError(f"{self.name}: inputs and targets of {part} must be numpy arrays")
            if targets.dtype != np.int64 and self.kind not in ("regression", "custom"):
                raise ValueError(f"{self.name}: targets of {part} must be int64, or the kind regression or custom")
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

    def examples(self, *, test: bool = False) -> Arrays:
        """Return the arrays as tensors."""
        inputs, targets = self.test if test else self.train
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def labels(self, *, test: bool = False, needed: bool = True) -> Labels:
        """Return one class per example. Without classes they are all 0, or ValueError is raised if they are needed."""
        targets = (self.test if test else self.train)[1]
        if targets.dtype == np.int64:
            return targets
        if needed:
            raise ValueError(f"{self.name} has no classes to split by: use a partition of kind iid or natural")
        return np.zeros(len(targets), np.int64)

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


@dataclass(frozen=True, eq=False)
class Datasets:
    """Map-style datasets, such as those of `torch.utils.data`: examples of any structure, which are read when used.

    One dataset for all clients is split by a partition. Of several, each is the data of one natural owner: a partition
    of kind `natural` makes them clients.
    """

    train: MapStyle | Sequence[MapStyle]
    """One dataset, or a list of datasets, one per owner."""
    test: MapStyle | Sequence[MapStyle] | None = None
    """One dataset, or a list with one per owner. `federated` holds out training examples if there is none."""
    collate: Collate | None = None
    """Makes a batch of a list of examples; by default `torch.utils.data.default_collate`."""
    kind: Kind = "classification"
    class_names: tuple[str, ...] = ()
    """By default those that the first dataset lists as `classes`, if it does."""
    name: str = "datasets"
    ordered: bool = False
    """Whether examples are in order of time. If so, the last ones are held out, not random ones."""
    gap: int = 0
    """Number of examples between training and test examples that overlap with both, and belong to neither."""
    _train: Records = field(init=False)
    _test: Records | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_train", Records(listed(self.train), self.collate))
        if self.test is not None:
            object.__setattr__(self, "_test", Records(listed(self.test), self.collate))
            if self.owners and isinstance(self.test, list | tuple) and len(self.test) != len(self.owners):
                raise ValueError(f"{self.name}: {len(self.owners)} training datasets and {len(self.test)} of test data")
        if not self.class_names:
            names = getattr(listed(self.train)[0], "classes", ())
            object.__setattr__(self, "class_names", tuple(map(str, names)) if isinstance(names, list | tuple) else ())

    @property
    def classes(self) -> int:
        """Number of classes; 0 if it is not known."""
        return len(self.class_names)

    @property
    def owners(self) -> tuple[str, ...]:
        """The numbers of the owners as text; empty if one dataset belongs to all."""
        return tuple(map(str, range(len(self.train)))) if isinstance(self.train, list | tuple) else ()

    @property
    def train_ids(self) -> Labels | None:
        """The owner of each training example."""
        return np.repeat(np.arange(len(self.owners)), self._train.sizes) if self.owners else None

    @property
    def test_ids(self) -> Labels | None:
        """The owner of each test example, if there is one test dataset per owner."""
        if self._test is None or not self.owners or not isinstance(self.test, list | tuple):
            return None
        return np.repeat(np.arange(len(self.owners)), self._test.sizes)

    @property
    def transform(self) -> AsStored:
        """Datasets transform their examples themselves."""
        return AsStored()

    def examples(self, *, test: bool = False) -> Records:
        """Return the examples of all datasets."""
        if test and self._test is None:
            raise ValueError(f"{self.name} has no test data")
        return self._test if test and self._test is not None else self._train

    def labels(self, *, test: bool = False, needed: bool = True) -> Labels:
        """Return one class per example. If they are not needed, they are 0 where examples had to be read for them."""
        if test and self._test is None:
            return np.empty(0, np.int64)
        records = self.examples(test=test)
        if needed and self.kind not in ("classification", "binary"):
            raise ValueError(f"{self.name} has no classes to split by: use a partition of kind iid or natural")
        found = records.targets() if needed else records.known_targets()
        return np.zeros(len(records), np.int64) if found is None else found.numpy()

    def __str__(self) -> str:
        """One line: sizes, classes, owners, and what identifies the examples."""
        test = 0 if self._test is None else len(self._test)
        parts = [f"{self.name}: {len(self._train):,} train and {test:,} test examples"]
        parts += [f"{self.classes} classes"] if self.classes else []
        parts += [f"{len(self.owners):,} natural owners"] if self.owners else []
        return f"{', '.join(parts)}; identified by {self._train.identified_by}"


def listed(given: MapStyle | Sequence[MapStyle]) -> Sequence[MapStyle]:
    """Return datasets as a list: a list or tuple holds one per owner, anything else is one dataset."""
    return given if isinstance(given, list | tuple) else [given]


def count(ids: Labels | None, examples: tuple[Array, Labels]) -> int:
    """Return the number of rows that are examples."""
    return len(examples[1]) if ids is None else int((ids >= 0).sum())
