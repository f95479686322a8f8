"""What is to be learnt: a model, a loss and the clients' data."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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

    def train(self, batch: Tensor, rng: torch.Generator) -> Tensor:
        """Return the batch."""
        return batch

    def test(self, batch: Tensor) -> Tensor:
        """Return the batch."""
        return batch


@dataclass(frozen=True)
class FederatedData:
    """Examples, and who has which of them.

    Arrays are shared by all clients; a client is a list of positions. `central` is the test set of the global model;
    `test_of` lists each client's own test examples within it, where there are any.
    """

    train: Examples
    train_of: Sequence[Tensor]
    central: Examples | None = None
    test_of: Sequence[Tensor] | None = None
    transform: Transform = AsStored()

    @property
    def clients(self) -> int:
        """Number of clients in the population."""
        return len(self.train_of)

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

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        if self.kind == "binary":
            return F.binary_cross_entropy_with_logits(outputs.flatten(), targets.to(outputs.dtype))
        return F.cross_entropy(outputs, targets)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count the right answers of a batch."""
        guess = (outputs.flatten() > 0).to(targets.dtype) if self.kind == "binary" else outputs.argmax(1)
        return (guess == targets).sum()

    def evaluate(self, model: nn.Module, examples: Examples, batch: int = 500) -> dict[str, float]:
        """Measure accuracy and loss (language: perplexity too) of a model as it is deployed."""
        was_training = model.training
        model.eval()
        first = next(iter(model.parameters()), torch.zeros(()))
        right, loss, count = 0, 0.0, len(examples[1])
        with torch.inference_mode():
            for x, y in zip(torch.split(examples[0], batch), torch.split(examples[1], batch), strict=True):
                outputs, targets = model(like(self.data.transform.test(x), first)), y.to(first.device)
                right += int(self.correct(outputs, targets))
                loss += float(self.loss(outputs, targets)) * len(y)
        model.train(was_training)
        scores = {"accuracy": right / count, "loss": loss / count, "examples": float(count)}
        if self.kind == "language":
            scores["perplexity"] = math.exp(min(loss / count, 700.0))
        return scores


def like(inputs: Tensor, parameter: Tensor) -> Tensor:
    """Move inputs to where a model is, and to its type unless they are token ids."""
    return inputs.to(parameter.device, parameter.dtype if inputs.is_floating_point() else None)
