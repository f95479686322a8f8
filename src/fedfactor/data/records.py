"""Examples of map-style datasets: read one by one, and put into batches by a `collate` function."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

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
            if isinstance(dataset, IterableDataset) or not isinstance(dataset, MapStyle):
                raise ValueError(
                    f"dataset {number} is a {type(dataset).__name__}: map-style datasets with __getitem__ and __len__ "
                    "are needed, because clients read their examples by position"
                )
        self.datasets, self.collate = tuple(datasets), collate or default_collate
        self.sizes = [len(dataset) for dataset in self.datasets]
        self.ends = torch.tensor(self.sizes, dtype=torch.int64).cumsum(0)
        self.where = torch.arange(sum(self.sizes))
        if not len(self.where):
            raise ValueError("the datasets have no examples")

    def __len__(self) -> int:
        return len(self.where)

    def __getitem__(self, where: Tensor | slice) -> Records:
        view = copy.copy(self)
        view.where = self.where[where]
        return view

    def batch(self, *, training: bool) -> Any:
        """Read all examples of this view as one batch.

        Random examples are the same in each test, and depend in training on torch's global generator. Both hold for
        examples that draw from numpy or Python's `random` too.
        """
        seed = int(torch.randint(2**62, ())) if training else derive(0, "read", int(self.where[0]))
        with all_seeded(seed):
            found = self.collate(list(self._examples()))
        sizes = _sizes(found)
        if sizes and len(self) not in sizes:
            raise ValueError(
                f"collate returned a batch of {sizes[0]} examples for {len(self)}: it must keep all of them. Leave "
                "unwanted examples out of the dataset instead"
            )
        return found

    def _examples(self) -> Iterator[Any]:
        numbers = torch.searchsorted(self.ends, self.where, right=True).tolist()
        for number, position in zip(numbers, self.where.tolist(), strict=True):
            dataset, size = self.datasets[number], self.sizes[number]
            if len(dataset) != size:
                raise ValueError(
                    f"dataset {number} ({type(dataset).__name__}) had {size} examples when the run began and has "
                    f"{len(dataset)} now: its length must not change"
                )
            yield dataset[position - int(self.ends[number]) + size]

    @property
    def identified_by(self) -> str:
        """What `fingerprint` hashes, in words."""
        marked, sampled = self._marked(), min(SAMPLED, len(self._unmarked()))
        parts = [f"{len(marked)} `fingerprint()`s"] if marked else []
        return " and ".join([*parts, f"a sample of {sampled} examples"] if sampled else parts)

    def fingerprint(self) -> str:
        """Return a hash of the datasets: of what their `fingerprint()` returns, or else of a sample of examples."""
        digest = hashlib.sha256(str([self.sizes, self._marked()]).encode())
        rest = self._unmarked()
        for position in rest[:: max(1, -(-len(rest) // SAMPLED))].tolist():
            one = copy.copy(self)
            one.where = torch.tensor([position])
            _update(digest, one.batch(training=False))
        return digest.hexdigest()[:16]

    def _marked(self) -> dict[int, str]:
        marks = {number: getattr(dataset, "fingerprint", None) for number, dataset in enumerate(self.datasets)}
        return {number: str(mark()) for number, mark in marks.items() if callable(mark)}

    def _unmarked(self) -> Tensor:
        """Return the positions of all examples of datasets without `fingerprint()`."""
        has = torch.tensor([callable(getattr(dataset, "fingerprint", None)) for dataset in self.datasets])
        return torch.arange(sum(self.sizes))[~has.repeat_interleave(torch.tensor(self.sizes))]


def _sizes(batch: Any) -> list[int]:
    """Return the lengths of a batch's parts, as far as they have one: one of them must be the number of examples."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    return [len(part) for part in parts if (part.dim() if isinstance(part, Tensor) else isinstance(part, list | tuple))]


def _update(digest: Any, value: Any) -> None:
    """Hash tensors, numbers and text in nested structures; of other objects, their type."""
    if isinstance(value, Mapping):
        value = [part for key in sorted(value, key=str) for part in (str(key), value[key])]
    if isinstance(value, tuple | list):
        digest.update(f"{len(value)}".encode())
        for part in value:
            _update(digest, part)
    elif isinstance(value, Tensor | np.ndarray):
        array = np.ascontiguousarray(value.detach().cpu().view(torch.uint8) if isinstance(value, Tensor) else value)
        digest.update(f"{value.dtype}{list(value.shape)}".encode() + array.tobytes())
    else:
        plain = isinstance(value, str | bytes | int | float | bool | None)
        digest.update((repr(value) if plain else type(value).__name__).encode())
