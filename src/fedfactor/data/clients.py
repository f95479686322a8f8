"""Examples, and how they are distributed over clients."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, overload

import torch
from torch import Tensor

from fedfactor.data.batches import arguments, filled
from fedfactor.data.records import Records

Kind = Literal["classification", "binary", "language", "regression", "custom"]
Arrays = tuple[Tensor, Tensor]
"""Inputs and targets, one row per example."""
Examples = Arrays | Records
"""Examples as two tensors, or of map-style datasets."""


class Transform(Protocol):
    """Turns a batch of inputs as they are stored into what the model reads."""

    def train(self, batch: Tensor, rng: torch.Generator) -> Tensor:
        """Return a batch for training; random augmentation takes its numbers from `rng`."""
        ...

    def test(self, batch: Tensor) -> Tensor:
        """Return a batch for testing."""
        ...


@dataclass(frozen=True)
class AsStored:
    """Passes inputs to the model as they are stored."""

    def __str__(self) -> str:
        """Return the transform as a formula of x."""
        return "x"

    def train(self, batch: Tensor, rng: torch.Generator) -> Tensor:
        """Return the batch."""
        return batch

    def test(self, batch: Tensor) -> Tensor:
        """Return the batch."""
        return batch


@dataclass(frozen=True)
class Virtual(Sequence[Tensor]):
    """A population of any size over the same examples, whose positions are computed on demand.

    It replaces a list in `FederatedData`. `positions` must always return the same for the same client.
    """

    clients: int
    positions: Callable[[int], Tensor]

    def __len__(self) -> int:
        return self.clients

    @overload
    def __getitem__(self, client: int) -> Tensor: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, client: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(client, slice):
            return [self[one] for one in range(*client.indices(self.clients))]
        if not 0 <= client < self.clients:
            raise IndexError(f"there is no client {client} in a population of {self.clients}")
        return self.positions(client)

    def some(self) -> list[int]:
        """Return a few clients spread over the population, which are checked and hashed in place of all."""
        return sorted({round(share * (self.clients - 1) / 15) for share in range(16)})


@dataclass(frozen=True)
class FederatedData:
    """Examples distributed over clients. All clients share the arrays; a client is a tensor of positions in them."""

    train: Examples
    train_of: Sequence[Tensor]
    """Positions of each client's training examples: a list, or a `Virtual` population."""
    central: Examples | None = None
    """Test set of the global model."""
    test_of: Sequence[Tensor] | None = None
    """Positions of each client's own test examples within `central`."""
    transform: Transform = AsStored()
    described: bool = False
    """Whether the examples only have the shape of the clients' real ones, which are elsewhere."""
    validation: bool = False
    """Whether `central` and `test_of` are held-out training examples instead of test data."""

    def __post_init__(self) -> None:
        for name, examples in (("train", self.train), ("central", self.central)):
            if examples is not None:
                _check_examples(name, examples)
        _check_parts("train_of", self.train_of, count(self.train), empty=False)
        if self.test_of is not None:
            if self.central is None or len(self.test_of) != len(self.train_of):
                raise ValueError("test_of needs central, and one tensor of positions per client")
            _check_parts("test_of", self.test_of, count(self.central), empty=True)

    @classmethod
    def without_examples(cls, clients: int, example: Tensor) -> FederatedData:
        """Return data of clients whose examples are not available; `example` is one input as the model reads it."""
        train = example[None], torch.zeros(1, dtype=torch.int64)
        return cls(train, Virtual(clients, lambda client: torch.zeros(1, dtype=torch.int64)), described=True)

    @classmethod
    def outlined(cls, clients: int, found: Any) -> FederatedData:
        """Return data of clients whose examples are not available, given the outline of a batch of one example."""
        train = Records([[None]], lambda examples: filled(found, len(examples)))
        return cls(train, Virtual(clients, lambda client: torch.zeros(1, dtype=torch.int64)), described=True)

    @property
    def clients(self) -> int:
        """Number of clients in the population."""
        return len(self.train_of)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the clients' training positions and of the targets, or of the sizes of datasets."""
        parts = list(_looked_at(self.train_of).values())
        what = torch.tensor(self.train.sizes) if isinstance(self.train, Records) else self.train[1]
        return _hash(torch.tensor([len(part) for part in parts]), torch.cat(parts), what)

    @cached_property
    def inputs_fingerprint(self) -> str:
        """Hash of the training inputs, or of a sample of their rows if they have more bytes than `HASHED_BYTES`."""
        return self.train.fingerprint() if isinstance(self.train, Records) else _hash(*_sampled(self.train[0]))

    @cached_property
    def test_fingerprint(self) -> str:
        """Hash of the test inputs, sampled like the training inputs, of their targets and of the clients' positions."""
        if self.central is None:
            return "none"
        parts = [] if self.test_of is None else list(_looked_at(self.test_of).values())
        where = [torch.tensor([len(part) for part in parts]), *parts]
        if isinstance(self.central, Records):
            return f"{self.central.fingerprint()}-{_hash(*where)}"
        return _hash(*_sampled(self.central[0]), self.central[1], *where)

    @property
    def identified_by(self) -> str:
        """What identifies the training inputs when a run is resumed (`inputs_fingerprint`), in words."""
        if self.described:
            return "their shape: the clients have the data"
        if isinstance(self.train, Records):
            return self.train.identified_by
        step = _step(self.train[0])
        return "all inputs" if step == 1 else f"one of {step} inputs"

    @property
    def example(self) -> Tensor:
        """One input as the model reads it. Raise ValueError if inputs are not one tensor (`takes_tensor`)."""
        inputs = self._input
        if not isinstance(inputs, Tensor):
            raise ValueError(f"the inputs must be one tensor, but are a {type(inputs).__name__}")
        return inputs[0]

    @property
    def takes_tensor(self) -> bool:
        """Whether the model's input is one tensor."""
        return isinstance(self._input, Tensor)

    @property
    def _input(self) -> Any:
        """The input of a batch of one example. Not kept: a view of it would be sent to workers with all the data."""
        batch = self.batch(self.train, slice(1))
        return next(iter(arguments(batch)[0]), batch)

    def batch(self, examples: Examples, where: Tensor | slice, rng: torch.Generator | None = None) -> Any:
        """Return some of the examples as one batch: `(inputs, targets)`, or what `collate` returns.

        With `rng` it is a batch for training, and augmentation of arrays takes its random numbers from it.
        """
        if isinstance(examples, Records):
            return examples[where].batch(training=rng is not None)
        inputs, targets = examples[0][where], examples[1][where]
        return self.transform.test(inputs) if rng is None else self.transform.train(inputs, rng), targets

    def find(self, bad: Tensor, *, test: bool) -> tuple[int, str] | None:
        """Return a bad row and, in words, whose it is; `None` if no bad row is used.

        `bad` has one boolean per row of the training data or, with `test`, of the test data.
        """
        if not bad.any():
            return None
        parts, name = (self.test_of or [], "test") if test else (self.train_of, "training")
        if not isinstance(parts, Virtual):  # too many to ask, or a device whose data are all its own
            for client, part in enumerate(parts):
                if bad[part].any():
                    row = int(part[bad[part]][0])
                    return row, f"row {row} of the {name} data (client {client})"
            if not test:  # the central test set is used as a whole
                return None
        row = int(bad.nonzero()[0])
        return row, f"row {row} of the {name} data"

    def of(self, client: int) -> Examples:
        """Return a client's training examples."""
        return rows(self.train, self.train_of[client])

    def mislabelled(self, examples: Examples) -> Examples:
        """Return examples with the classes in reverse order. Raise ValueError if their classes are not in a tensor."""
        if isinstance(examples, Records) or isinstance(self.train, Records) or self.train[1].is_floating_point():
            raise ValueError("attack.kind: label_flip needs classes in a tensor, but the data are datasets or numbers")
        return examples[0], self.train[1].max() - examples[1]

    def own_test(self, client: int) -> Examples | None:
        """Return a client's own test examples, or `None` if it has none."""
        if self.test_of is None or self.central is None or not len(self.test_of[client]):
            return None
        return rows(self.central, self.test_of[client])


def _sampled(inputs: Tensor) -> list[Tensor]:
    """Return the shape and every k-th row, with the smallest k for which these rows fit into `HASHED_BYTES`."""
    return [torch.tensor(inputs.shape), *torch.split(inputs[:: _step(inputs)], HASHED_ROWS)]


def _step(inputs: Tensor) -> int:
    return max(1, math.ceil(inputs.numel() * inputs.element_size() / HASHED_BYTES))


HASHED_BYTES = 2**28
"""Inputs of up to this size are hashed completely, which takes about 0.3 seconds; larger ones are sampled."""
HASHED_ROWS = 256
"""Rows that are hashed at once: inputs may be a view that would not fit into memory as a copy."""


def _hash(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        dense = tensor.detach().cpu().contiguous()
        # A contiguous tensor of one element may have any stride, but can be seen as bytes only with the stride 1.
        digest.update(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def count(examples: Examples) -> int:
    """Return the number of examples."""
    return len(examples) if isinstance(examples, Records) else len(examples[1])


def rows(examples: Examples, where: Tensor | slice) -> Examples:
    """Return some of the examples."""
    return examples[where] if isinstance(examples, Records) else (examples[0][where], examples[1][where])


def _check_examples(name: str, examples: Examples) -> None:
    if isinstance(examples, Records):
        return
    if not all(isinstance(part, Tensor) for part in examples):
        raise ValueError(f"{name} must be two tensors, inputs and targets; torch.as_tensor converts arrays")
    if len(examples[0]) != len(examples[1]):
        raise ValueError(f"{name} has {len(examples[0])} inputs but {len(examples[1])} targets")


def _looked_at(parts: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the positions by client: of all clients, or of a few in a `Virtual` population."""
    return {client: parts[client] for client in (parts.some() if isinstance(parts, Virtual) else range(len(parts)))}


def _check_parts(name: str, parts: Sequence[Tensor], examples: int, *, empty: bool) -> None:
    if len(parts) < 1:
        raise ValueError(f"{name} lists no client")
    for client, part in _looked_at(parts).items():
        if not len(part):
            if empty:
                continue
            raise ValueError(f"client {client} has no examples; leave it out, or split the data over fewer clients")
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= examples:
            raise ValueError(f"{name} of client {client} reaches from {low} to {high}, there are {examples} examples")
