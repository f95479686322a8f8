"""What is to be learnt: a model, a loss and the clients' data."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedfactor.data.clients import Examples, FederatedData, Kind
from fedfactor.models.width import Width
from fedfactor.profile import timed

Build = Callable[..., nn.Module]
"""Builds the task's model at a share of its full width."""


BatchSums = tuple[int, float, int]
"""Right answers, sum of the loss, and number of targets of a batch."""

EVALUATION_BATCH = 100
"""Examples per batch in evaluations unless a run sets it. On one CPU core, CIFAR's networks (VGG16, ResNet-8 and -18)
take the least time per image with 50 to 100, and 21 to 35 % more with 500, whose activations do not fit the cache."""


@dataclass(frozen=True)
class Task:
    """A model (or a factory that takes `width`), the data, and what kind of answer is wanted."""

    model: nn.Module | Callable[..., nn.Module]
    data: FederatedData
    kind: Kind = "classification"
    evaluation_batch: int = EVALUATION_BATCH
    """Examples per batch in evaluations."""
    _takes_width: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.kind not in ("classification", "binary", "language"):
            raise ValueError(f"kind must be classification, binary or language, got {self.kind!r}")
        self._check_data()
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

    def _check_data(self) -> None:
        """Raise ValueError if targets do not fit the kind or training inputs are not finite; warn of test inputs."""
        for test, examples in ((False, self.data.train), (True, self.data.central)):
            if examples is None:
                continue
            inputs, targets = examples
            if self.kind == "binary":
                self._refuse((targets != 0) & (targets != 1), test, targets, "must be 0 or 1 in a binary task")
            elif targets.dtype not in (torch.int64, torch.uint8):
                raise ValueError(
                    f"targets of a {self.kind} task must be labels of type torch.int64, got {targets.dtype} in the "
                    f"{'test' if test else 'training'} data; targets.long() converts whole numbers; regression "
                    "is not supported"
                )
            else:
                self._refuse(targets < 0, test, targets, "must not be negative")
            found = self.data.find(_not_finite(inputs), test=test) if inputs.is_floating_point() else None
            if found and test:
                text = "an answer of NaN counts as wrong, and a loss of NaN is left out"
                warnings.warn(f"the input in {found[1]} has NaN or infinite entries: {text}", stacklevel=5)
            elif found:
                text = "remove such rows, or replace these entries by numbers"
                raise ValueError(f"the input in {found[1]} has NaN or infinite entries: {text}")

    def _refuse(self, bad: Tensor, test: bool, targets: Tensor, reason: str) -> None:
        """Raise ValueError if a bad target is used."""
        found = self.data.find(bad.reshape(len(bad), -1).any(1), test=test)
        if found:
            row, place = found
            raise ValueError(f"targets {reason}, got {targets[row][bad[row]].flatten()[0]:g} in {place}")

    def check_outputs(self, model: nn.Module) -> None:
        """Raise ValueError if the model cannot process the data, or if its outputs do not fit the targets."""
        if self.data.described:
            return
        inputs, targets = (part[:2] for part in self.data.train)
        try:
            with torch.no_grad():
                outputs = self._answers(model, inputs)
        except Exception as error:
            shape = " x ".join(map(str, inputs.shape[1:]))
            raise ValueError(
                f"the model cannot process the data, whose inputs are {shape or 'single numbers'}: {error}"
            ) from error
        if not isinstance(outputs, Tensor):
            raise ValueError(f"the model must return a tensor of logits, got a {type(outputs).__name__}")
        if self.kind == "binary":
            fits, wanted = outputs.numel() == targets.numel(), "one logit per target"
        else:
            fits = outputs.dim() > 1 and (len(outputs), *outputs.shape[2:]) == targets.shape
            wanted = "logits of shape N x classes for targets of shape N (targets.flatten() turns N x 1 into N)"
        if not fits:
            shapes = (" x ".join(["N", *map(str, one.shape[1:])]) for one in (outputs, targets))
            found = "the model returns {} for targets of shape {}".format(*shapes)
            raise ValueError(f"a {self.kind} task needs {wanted}; {found}")
        if self.kind != "binary":
            for test, examples in ((False, self.data.train), (True, self.data.central)):
                if examples is not None:
                    reason = f"must be less than {outputs.shape[1]}, the number of classes of the model"
                    self._refuse(examples[1] >= outputs.shape[1], test, examples[1], reason)

    def _answers(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the outputs of a model as it is deployed."""
        was_training = model.training
        first = next(iter(model.parameters()), torch.zeros(()))
        outputs: Tensor = model.eval()(like(self.data.transform.test(inputs), first))
        model.train(was_training)
        return outputs

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
        """Count the right answers of a batch; NaN is none."""
        if self.kind == "binary":
            outputs, targets = outputs.flatten(), targets.flatten()
            return (((outputs > 0) == (targets > 0)) & ~outputs.isnan()).sum()
        return ((outputs.argmax(1) == targets) & ~outputs.isnan().any(1)).sum()

    def evaluate(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        """Measure accuracy and loss (language: perplexity too) of a model as it is deployed.

        An answer of NaN is wrong. A loss that is not finite is left out.
        """
        return self.scores(self.batch_sums(model, examples))

    @timed("evaluating")
    def batch_sums(self, model: nn.Module, examples: Examples) -> list[BatchSums]:
        """Return right answers, summed loss and targets of each batch of an evaluation."""
        found = []
        with torch.inference_mode():
            for x, y in zip(*(torch.split(part, self.evaluation_batch) for part in examples), strict=True):
                outputs = self._answers(model, x)
                targets = y.to(outputs.device)
                loss = float(self.loss(outputs, targets)) * y.numel()
                found.append((int(self.correct(outputs, targets)), loss, y.numel()))
        return found

    def scores(self, sums: Sequence[BatchSums]) -> dict[str, float]:
        """Return accuracy and loss (language: perplexity too), given the sums of all batches."""
        right, loss, count = (sum(column) for column in zip(*sums, strict=True)) if sums else (0, 0.0, 0)
        if not count:
            raise ValueError("there are no examples to measure on")
        scores = {"accuracy": right / count, "loss": loss / count, "examples": float(count)}
        if self.kind == "language":
            scores["perplexity"] = math.exp(min(loss / count, 700.0))
        return {key: score for key, score in scores.items() if math.isfinite(score)}


def _not_finite(inputs: Tensor) -> Tensor:
    """Return which rows have an entry that is not finite, in one pass over parts that fit a processor's cache."""
    found = torch.zeros(len(inputs), dtype=torch.bool)
    rows = max(1, CHECKED // max(1, inputs[:1].numel()))
    for start in range(0, len(inputs), rows):
        part = inputs[start : start + rows]
        if not math.isfinite(part.sum()):  # cheap; it may also overflow
            found[start : start + rows] = ~part.reshape(len(part), -1).isfinite().all(1)
    return found


CHECKED = 1 << 18
"""Number of entries that are checked at once."""


def like(inputs: Tensor, parameter: Tensor) -> Tensor:
    """Move inputs to where a model is, and to its type unless they are token ids."""
    return inputs.to(parameter.device, parameter.dtype if inputs.is_floating_point() else None)


def masked_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Set the logits of classes that a client does not have to 0: they then push nothing down."""
    mask = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
    mask[labels.to(logits.device)] = True
    return logits.masked_fill(~mask, 0.0)
