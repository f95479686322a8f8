"""What is to be learnt: a model, a loss and the clients' data."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedfactor.data.clients import Examples, FederatedData, Kind
from fedfactor.models.width import Width
from fedfactor.profile import timed

Build = Callable[..., nn.Module]
"""Builds the task's model at a share of its full width."""


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

    def build(self, width: float | Width = 1.0) -> nn.Module:
        """Build the model at a share of its full width."""
        if isinstance(self.model, nn.Module):
            built = copy.deepcopy(self.model)
        else:
            built = self.model(width=width) if self._takes_width else self.model()
        if width != 1.0 and not self._takes_width:
            raise ValueError(
                f"the method asks for a model of width {float(width):g}, but the model given has one size only; "
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
