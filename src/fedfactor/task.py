"""What is to be learnt: a model, a loss and the clients' data."""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedfactor.profile import timed

Kind = Literal["classification", "binary", "language"]
Examples = tuple[Tensor, Tensor]
"""Inputs and targets, one row an example."""


class Transform(Protocol):
    """What happens to a batch of inputs as they are stored, before the model sees them."""

    def train(self, batch: Tensor, rng: torch.Generator) -> Tensor:
        """Return a batch for training, augmented by random numbers from `rng`."""
        ...

    def test(self, batch: Tensor) -> Tensor:
        """Return a batch for testing."""
        ...


@dataclass(frozen=True)
class AsStored:
    """Inputs go to the model as they are stored."""

    def __str__(self) -> str:
        """Say what is done: nothing."""
        return "x"

    def train(self, batch: Tensor, rng: torch.Generator) -> Tensor:
        """Return the batch."""
        return batch

    def test(self, batch: Tensor) -> Tensor:
        """Return the batch."""
        return batch


@dataclass(frozen=True)
class Virtual(Sequence[Tensor]):
    """A population of any size over the same examples: a client's positions are worked out when they are asked for.

    Takes the place of a list in `FederatedData`. `positions` must answer the same for the same client every time.
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
        """Return a few clients spread over the population: those that are checked and fingerprinted for all."""
        return sorted({round(share * (self.clients - 1) / 15) for share in range(16)})


@dataclass(frozen=True)
class FederatedData:
    """Examples, and who has which of them.

    Arrays are shared by all clients; a client is a list of positions. `central` is the test set of the global model;
    `test_of` lists each client's own test examples within it, where there are any. Instead of lists there may be
    `Virtual` populations, of which a few clients are looked at beforehand.
    """

    train: Examples
    train_of: Sequence[Tensor]
    central: Examples | None = None
    test_of: Sequence[Tensor] | None = None
    transform: Transform = AsStored()

    def __post_init__(self) -> None:
        for name, examples in (("train", self.train), ("central", self.central)):
            if examples is not None:
                _check_examples(name, examples)
        _check_parts("train_of", self.train_of, len(self.train[1]), empty=False)
        if self.test_of is not None:
            if self.central is None or len(self.test_of) != len(self.train_of):
                raise ValueError("test_of lists positions within central, one list a client")
            _check_parts("test_of", self.test_of, len(self.central[1]), empty=True)

    @property
    def clients(self) -> int:
        """Number of clients in the population."""
        return len(self.train_of)

    @cached_property
    def fingerprint(self) -> str:
        """Tells splits apart: a hash of who trains on which examples, and of their targets."""
        digest = hashlib.blake2b(digest_size=8)
        parts = list(_looked_at(self.train_of).values())
        sizes = torch.tensor([len(part) for part in parts])
        for tensor in (sizes, torch.cat(parts), self.train[1]):
            digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def example(self) -> Tensor:
        """One input as a model sees it."""
        return self.transform.test(self.train[0][:1])[0]

    def of(self, client: int) -> Examples:
        """Return a client's own training examples."""
        return _rows(self.train, self.train_of[client])

    def own_test(self, client: int) -> Examples | None:
        """Return a client's own test examples; `None` where it has none."""
        if self.test_of is None or self.central is None or not len(self.test_of[client]):
            return None
        return _rows(self.central, self.test_of[client])


def _rows(examples: Examples, where: Tensor) -> Examples:
    return examples[0][where], examples[1][where]


@dataclass(frozen=True)
class Task:
    """A model (or a factory that takes `width`), the data, and what kind of answer is wanted."""

    model: nn.Module | Callable[..., nn.Module]
    data: FederatedData
    kind: Kind = "classification"
    _takes_width: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.kind not in ("classification", "binary", "language"):
            raise ValueError(f"kind must be classification, binary or language, got {self.kind!r}")
        takes = not isinstance(self.model, nn.Module) and "width" in inspect.signature(self.model).parameters
        object.__setattr__(self, "_takes_width", takes)

    def build(self, width: float = 1.0) -> nn.Module:
        """Build the model at a share of its full width."""
        if isinstance(self.model, nn.Module):
            built = copy.deepcopy(self.model)
        else:
            built = self.model(width=width) if self._takes_width else self.model()
        if width != 1.0 and not self._takes_width:
            raise ValueError(
                f"the method asks for a model of width {width:g}, but the model given has one size only; "
                "give a factory that takes `width`, such as lambda width: Net(width)"
            )
        return built

    def check_masked(self, wanted: bool) -> None:
        """Refuse a loss over some of the classes where there are none to choose from."""
        if wanted and self.kind != "classification":
            raise ValueError(f"a masked loss leaves out classes; a {self.kind} task has none to leave out")

    def loss(self, outputs: Tensor, targets: Tensor, only: Tensor | None = None) -> Tensor:
        """Return the mean loss of a batch; with `only`, the logits of all other classes are set to 0."""
        if only is not None:
            outputs = masked_logits(outputs, only)
        if self.kind == "binary":
            return F.binary_cross_entropy_with_logits(outputs.flatten(), targets.flatten().to(outputs.dtype))
        return F.cross_entropy(outputs, targets)

    def divergence(self, outputs: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
        """Return how far the answers to a batch are from a teacher's: T^2 KL(teacher / T, outputs / T), the mean.

        T^2 makes up for the gradient, which falls with the square of the temperature (Hinton et al. 2015).
        """
        if self.kind == "binary":  # one logit stands for the two classes' difference
            outputs, teacher = (
                torch.stack([torch.zeros_like(t), t], 1) for t in (outputs.flatten(), teacher.flatten())
            )
        wanted, found = (F.log_softmax(logits / temperature, 1) for logits in (teacher.detach(), outputs))
        each = (wanted.exp() * (wanted - found)).sum(1)
        return temperature**2 * each.mean()

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count the right answers of a batch."""
        if self.kind == "binary":
            return ((outputs.flatten() > 0) == (targets.flatten() > 0)).sum()
        return (outputs.argmax(1) == targets).sum()

    @timed("evaluating")
    def evaluate(self, model: nn.Module, examples: Examples, batch: int = 500) -> dict[str, float]:
        """Measure accuracy and loss (language: perplexity too) of a model as it is deployed."""
        was_training = model.training
        model.eval()
        first = next(iter(model.parameters()), torch.zeros(()))
        right, loss, count = 0, 0.0, examples[1].numel()
        if not count:
            raise ValueError("there are no examples to measure on")
        with torch.inference_mode():
            for x, y in zip(torch.split(examples[0], batch), torch.split(examples[1], batch), strict=True):
                outputs, targets = model(like(self.data.transform.test(x), first)), y.to(first.device)
                right += int(self.correct(outputs, targets))
                loss += float(self.loss(outputs, targets)) * y.numel()
        model.train(was_training)
        scores = {"accuracy": right / count, "loss": loss / count, "examples": float(count)}
        if self.kind == "language":
            scores["perplexity"] = math.exp(min(loss / count, 700.0))
        return scores


def like(inputs: Tensor, parameter: Tensor) -> Tensor:
    """Move inputs to where a model is, and to its type unless they are token ids."""
    return inputs.to(parameter.device, parameter.dtype if inputs.is_floating_point() else None)


def masked_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Set the logits of classes that a client does not have to 0: they then push nothing down."""
    mask = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
    mask[labels.to(logits.device)] = True
    return logits.masked_fill(~mask, 0.0)


def _check_examples(name: str, examples: Examples) -> None:
    if not all(isinstance(part, Tensor) for part in examples):
        raise ValueError(f"{name} must be two tensors, inputs and targets; torch.as_tensor makes them of arrays")
    if len(examples[0]) != len(examples[1]):
        raise ValueError(f"{name} has {len(examples[0])} inputs but {len(examples[1])} targets")


def _looked_at(parts: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the positions of all clients, or of a few where all would be too many."""
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
