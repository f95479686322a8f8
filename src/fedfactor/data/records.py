"""Examples of map-style datasets: read one by one, and put into batches by a `collate` function."""

from __future__ import annotations

import copy
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from fedfactor.data.batches import targets_of
from fedfactor.rng import all_seeded, derive

Collate = Callable[[list[Any]], Any]
"""Makes a batch of a list of examples."""


@runtime_checkable
class MapStyle(Protocol):
    """A map-style dataset, such as a `torch.utils.data.Dataset` with a length: its examples are read by position."""

    def __getitem__(self, index: int, /) -> Any: ...
    def __len__(self) -> int: ...


SAMPLED = 64
"""Number of examples that are hashed where datasets have no `fingerprint()`."""
UNREAD = torch.iinfo(torch.int64).min
"""Stands for a class that is not known yet."""
READ = 256
"""Number of examples that are read at once for their targets."""


class Records:
    """Examples of one or several map-style datasets, in order; indexing with positions or a slice gives a view.

    Args:
        datasets: The datasets. Those of `torch.utils.data` and of Hugging Face fit.
        collate: Makes a batch of a list of examples; by default torch's `default_collate`.

    Raises:
        ValueError: A dataset is not map-style, or there is no example.
    """

    def __init__(self, datasets: Sequence[MapStyle], collate: Collate | None = None) -> None:
        for number, dataset in enumerate(datasets):
            if isinstance(dataset, Mapping | tuple):
                raise ValueError(
                    f"dataset {number} is a {type(dataset).__name__}, which looks like one example: a list must have "
                    "one dataset per client. For a list of examples give torch.utils.data.Subset(examples, "
                    "range(len(examples)))"
                )
            if isinstance(dataset, IterableDataset | Tensor | str) or not isinstance(dataset, MapStyle):
                raise ValueError(
                    f"dataset {number} is a {type(dataset).__name__}; clients read examples by position, so it must be "
                    "a map-style dataset with __getitem__ and __len__, such as torch.utils.data.TensorDataset(x, y)"
                )
        if collate is not None and not callable(collate):
            raise TypeError(f"collate must be a function of a list of examples, got {collate!r}")
        self.datasets, self.collate = tuple(datasets), collate or default_collate
        self.sizes = [len(dataset) for dataset in self.datasets]
        self.starts = [0, *accumulate(self.sizes)]
        self.where = torch.arange(self.starts[-1])
        # One class per example, as far as datasets list them or they were read; all views share this tensor.
        listed = [_listed(dataset, size) for dataset, size in zip(self.datasets, self.sizes, strict=True)]
        self._targets = torch.cat([torch.empty(0, dtype=torch.int64), *listed])
        if not len(self.where):
            raise ValueError("the datasets, of training or of `test`, have no examples")

    def __len__(self) -> int:
        return len(self.where)

    def __getitem__(self, where: Tensor | slice) -> Records:
        return self._at(self.where[where])

    def batch(self, *, training: bool) -> Any:
        """Read all examples of this view as one batch.

        Random examples are the same in each test, and depend in training on torch's global generator. Both hold for
        examples that draw from numpy or Python's `random` too.
        """
        seed = int(torch.randint(2**62, ())) if training else derive(0, "read", int(self.where[0]))
        with all_seeded(seed):
            examples = list(self._examples())
            try:
                found = self.collate(examples)
            except Exception as error:
                own = "" if self.collate is not default_collate else "; a `collate` function of yours can pad examples"
                raise ValueError(f"collate failed: {type(error).__name__}: {error}{own}") from error
        sizes, targets = _sizes(found), _targets(found)
        if (sizes and len(self) not in sizes) or (targets is not None and len(targets) < len(self)):
            kept = sizes[0] if targets is None else len(targets)
            raise ValueError(
                f"collate returned a batch of {kept} examples for {len(self)}: it must keep all of them. Leave "
                "unwanted examples out of the dataset instead"
            )
        return found

    def _examples(self) -> Iterator[Any]:
        for position in self.where.tolist():
            number = bisect_right(self.starts, position) - 1
            dataset, size = self.datasets[number], self.sizes[number]
            if len(dataset) != size:
                raise ValueError(
                    f"dataset {number} ({type(dataset).__name__}) had {size} examples when the run began and has "
                    f"{len(dataset)} now: its length must not change"
                )
            index = position - self.starts[number]
            try:
                example = dataset[index]
            except Exception as error:
                what = f"example {index} of dataset {number} ({type(dataset).__name__})"
                raise ValueError(f"{what} cannot be read: {type(error).__name__}: {error}") from error
            yield example

    def targets(self) -> Tensor:
        """Return the classes of the examples; those that no dataset lists as `targets` are read once.

        Raise ValueError if there is not one class per example.
        """
        unread = self.where[self._targets[self.where] == UNREAD]
        for first in range(0, len(unread), READ):
            part = unread[first : first + READ]
            found = targets_of(self._at(part).batch(training=False))
            if found.dim() != 1 or found.is_floating_point():
                kind = "real numbers" if found.is_floating_point() else "targets"
                raise ValueError(
                    f"one class per example is needed, but a batch has {kind} of shape {list(found.shape)}"
                )
            self._targets[part] = found.long()
        return self._targets[self.where]

    def known_targets(self) -> Tensor | None:
        """Return the classes of the examples, or `None` if examples had to be read for this."""
        known = self._targets[self.where]
        return None if (known == UNREAD).any() else known

    def _at(self, where: Tensor) -> Records:
        view = copy.copy(self)
        view.where = where
        return view

    @property
    def identified_by(self) -> str:
        """What `fingerprint` hashes, in words."""
        marked, rest = len(self._marked), len(self._unmarked)
        words = [f"the fingerprint() of {marked:,} datasets"] if marked else []
        words += [f"a sample of {min(SAMPLED, rest)} of {rest:,} examples"] if rest else []
        return " and ".join(words)

    def fingerprint(self) -> str:
        """Return a hash of the datasets: of what their `fingerprint()` returns, otherwise of a sample of examples."""
        digest = hashlib.sha256(str([self.sizes, self._marked]).encode())
        rest = self._unmarked
        for place in range(min(SAMPLED, len(rest))):
            one = rest[place * len(rest) // min(SAMPLED, len(rest))]
            _update(digest, self._at(one[None]).batch(training=False))
        return digest.hexdigest()[:16]

    @property
    def _marked(self) -> dict[int, str]:
        """What `fingerprint()` of each dataset that has it returns, by the number of the dataset."""
        marks = {number: getattr(dataset, "fingerprint", None) for number, dataset in enumerate(self.datasets)}
        found = {number: str(mark() or "") for number, mark in marks.items() if callable(mark)}
        if nothing := [number for number, mark in found.items() if not mark]:
            kind = type(self.datasets[nothing[0]]).__name__
            raise ValueError(f"fingerprint() of dataset {nothing[0]} ({kind}) returned nothing: return text")
        return found

    @property
    def _unmarked(self) -> Tensor:
        """The positions of all examples of datasets without `fingerprint()`."""
        free = torch.tensor([not callable(getattr(dataset, "fingerprint", None)) for dataset in self.datasets])
        return torch.arange(self.starts[-1])[free.repeat_interleave(torch.tensor(self.sizes))]


def _listed(dataset: MapStyle, size: int) -> Tensor:
    """Return the attribute `targets` of a dataset (torchvision's have it) if it holds one class per example."""
    found = getattr(dataset, "targets", None) if getattr(dataset, "target_transform", None) is None else None
    try:
        targets = torch.as_tensor([] if found is None else found)
    except (TypeError, ValueError, RuntimeError):  # such as names of classes
        targets = torch.empty(0)
    if targets.shape == (size,) and not targets.is_floating_point():
        return targets.long()
    return torch.full((size,), UNREAD)


def _sizes(batch: Any) -> list[int]:
    """Return the lengths of a batch's parts, as far as they have one: one of them must be the number of examples."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    return [len(part) for part in parts if (part.dim() if isinstance(part, Tensor) else isinstance(part, list | tuple))]


def _targets(batch: Any) -> Tensor | None:
    """Return the targets of a batch if it has them where they are looked for, and at least one axis."""
    try:
        found = targets_of(batch)
    except ValueError:
        return None
    return found if found.dim() else None


def _update(digest: Any, value: Any) -> None:
    """Hash tensors, numbers and text in nested structures; of other objects, their type."""
    if isinstance(value, Mapping):
        value = [part for key in sorted(value, key=str) for part in (str(key), value[key])]
    if isinstance(value, tuple | list):
        digest.update(f"{len(value)}".encode())
        for part in value:
            _update(digest, part)
    elif isinstance(value, Tensor | np.ndarray):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if isinstance(value, Tensor) else value
        array = np.ascontiguousarray(flat)
        digest.update(f"{value.dtype}{list(value.shape)}".encode() + array.tobytes())
    else:
        plain = isinstance(value, str | bytes | int | float | bool | None)
        digest.update((repr(value) if plain else type(value).__name__).encode())
