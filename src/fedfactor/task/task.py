"""What is to be learnt: a model, a loss and the clients' data."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fedfactor.data.batches import Batch, arguments, like, targets_of
from fedfactor.data.clients import Examples, FederatedData, Kind, count
from fedfactor.data.records import Records
from fedfactor.models.width import Width
from fedfactor.nn.adapt import Tune, shared_memory, tuned
from fedfactor.nn.frozen import freeze
from fedfactor.profile import timed
from fedfactor.support.checks import check_choice
from fedfactor.task.metrics import WITH_CLASSES, Decider, Metric, Metrics
from fedfactor.task.objective import IGNORED, LOSSES, Loss, check_loss, divergence, logits_of, masked_logits

Build = Callable[..., nn.Module]
"""Builds the task's model at a share of its full width."""


BatchSums = Mapping[str, tuple[float, int]]
"""By metric: its sum over a batch, and over how many targets or examples."""

EVALUATION_BATCH = 100
"""Examples per batch in evaluations unless a run sets it. On one CPU core, CIFAR's networks (VGG16, ResNet-8 and -18)
take the least time per image with 50 to 100, and 21 to 35 % more with 500, whose activations do not fit the cache."""


@dataclass(frozen=True)
class Task:
    """A model (or a factory that takes `width`), the data, and what kind of answer is wanted."""

    model: nn.Module | Callable[..., nn.Module]
    """A `width` whose default is above 1, such as a number of channels, is the factory's own affair."""
    data: FederatedData
    kind: Kind | None = None
    """What the targets are; by default classes, or `custom` where an objective is given."""
    evaluation_batch: int = EVALUATION_BATCH
    """Examples per batch in evaluations."""
    objective: Loss | None = None
    """The loss, in place of that of the kind or of the model: a function of the model's outputs and the batch."""
    metrics: Mapping[str, Metric] | Sequence[str] = ()
    """Metrics by name, beside those that all tasks of the kind have."""
    best: str | None = None
    """The metric that decides which model is best; by default the accuracy, or the loss if there are no classes."""
    higher_is_better: bool | None = None
    """Whether higher values of `best` are better; by default what the metric says."""
    tune: Tune | None = None
    """How the model is fine-tuned; `None`: all its parameters that require gradients are trained."""
    measures: Metrics = field(init=False, compare=False, repr=False)
    _takes_width: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.kind is None:
            object.__setattr__(self, "kind", "custom" if self.objective else "classification")
        check_choice("kind", str(self.kind), get_args(Kind))
        if self.objective is not None and not callable(self.objective):
            raise TypeError(f"loss must be a function of (outputs, batch), got {self.objective!r}; see `kind`, too")
        measures = Metrics(str(self.kind), self.metrics, self.best, self.higher_is_better)
        object.__setattr__(self, "measures", measures)
        self._check_data()
        object.__setattr__(self, "_takes_width", not isinstance(self.model, nn.Module) and _takes_width(self.model))

    def build(self, width: float | Width = 1.0) -> nn.Module:
        """Build the model at a share of its full width; frozen parameters are its base."""
        if isinstance(self.model, nn.Module):
            # Frozen tensors are never written to, so copies share them.
            built = copy.deepcopy(self.model, shared_memory(self.model, self.tune))
        else:
            built = self.model(width=width) if self._takes_width else self.model()
        if width != 1.0 and not self._takes_width:
            raise ValueError(
                f"the method asks for a model of width {float(width):g}, but the model given has one size only; "
                "give a factory that takes `width`, such as lambda width: Net(width)"
            )
        return tuned(built, self.tune) if self.tune else freeze(built)

    def _check_data(self) -> None:
        """Raise ValueError if targets do not fit the kind or training inputs are not finite; warn of test inputs."""
        for test, examples in ((False, self.data.train), (True, self.data.central)):
            if examples is None or isinstance(examples, Records):  # read when they are used
                continue
            inputs, targets = examples
            if self.kind == "binary":
                self._refuse((targets != 0) & (targets != 1), test, targets, "must be 0 or 1 in a binary task")
            elif self.kind == "regression":
                self._refuse(~targets.isfinite(), test, targets, "must be finite")
            elif self.kind != "custom" and targets.dtype not in (torch.int64, torch.uint8):
                raise ValueError(
                    f"targets of a {self.kind} task must be labels of type torch.int64, got {targets.dtype} in the "
                    f"{'test' if test else 'training'} data; targets.long() converts whole numbers; for real numbers, "
                    'use kind="regression"'
                )
            elif self.kind != "custom":
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
        """Raise ValueError if the model cannot process the data, or if its outputs fit neither targets nor loss."""
        if self.data.described:
            return
        batch = like(self.data.batch(self.data.train, slice(2)), _home(model))
        try:
            outputs = self._answers(model, batch)
        except Exception as error:
            raise ValueError(f"the model cannot process the data, {_shapes(batch)}: {error}") from error
        if self.kind != "custom":
            self._check_logits(logits_of(outputs), targets_of(batch))
        if not isinstance(outputs, Tensor) or self.objective is not None or self.kind == "custom":
            check_loss(self._tried_loss(outputs, batch))
        with torch.no_grad():
            self.measures.check(self._answers(model, batch), batch, min(2, count(self.data.train)))

    def _tried_loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the loss of a batch. Raise ValueError if it cannot be computed."""
        try:
            return self.loss(outputs, batch)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"the loss, which is called as loss(outputs, batch), failed: {reason}") from error

    def _check_logits(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ValueError if logits or numbers do not fit the targets."""
        if self.kind in ("binary", "regression"):
            unit = "logit" if self.kind == "binary" else "number"
            fits, wanted = outputs.numel() == targets.numel(), f"one {unit} per target"
        else:
            fits = outputs.dim() > 1 and (len(outputs), *outputs.shape[2:]) == targets.shape
            wanted = "logits of shape N x classes for targets of shape N (targets.flatten() turns N x 1 into N)"
        if not fits:
            shapes = (" x ".join(["N", *map(str, one.shape[1:])]) for one in (outputs, targets))
            found = "the model returns {} for targets of shape {}".format(*shapes)
            raise ValueError(f"a {self.kind} task needs {wanted}; {found}")
        if self.kind in ("classification", "language"):
            for test, examples in ((False, self.data.train), (True, self.data.central)):
                known = examples.known_targets() if isinstance(examples, Records) else examples and examples[1]
                if known is not None:
                    reason = f"must be less than {outputs.shape[1]}, the number of classes of the model"
                    self._refuse(known >= outputs.shape[1], test, known, reason)

    def _answers(self, model: nn.Module, batch: Batch) -> Any:
        """Return the outputs of a model as it is deployed."""
        was_training = model.training
        try:
            return self.outputs(model.eval(), batch)
        finally:
            model.train(was_training)

    def outputs(self, model: Callable[..., Any], batch: Batch) -> Any:
        """Call the model on a batch: `model(x)` for `(x, y)` or x alone, `model(**batch)` for a mapping."""
        if type(batch) is tuple:  # the usual case, shortly: this runs in every step
            return model(batch[0])
        args, named = arguments(batch)
        return model(*args, **named)

    def loss(self, outputs: Any, batch: Batch, only: Tensor | None = None) -> Tensor:
        """Return the mean loss of a batch; with `only`, the logits of all other classes are set to 0.

        It is the task's objective if there is one, otherwise the `loss` of the outputs if they have one, otherwise
        that of the task's kind.
        """
        if only is not None:
            outputs = masked_logits(logits_of(outputs), only)
        if self.objective is not None:
            found = self.objective(outputs, batch)
            if not isinstance(found, Tensor) or found.numel() != 1:
                check_loss(found)  # raises ValueError
            return found
        own = None if isinstance(outputs, Tensor) else getattr(outputs, "loss", None)
        if own is not None:
            return own  # type: ignore[no-any-return]
        if self.kind is None or self.kind == "custom":
            raise ValueError("a custom task needs a loss: give one, or let the model return an object with `loss`")
        logits = logits_of(outputs)
        try:
            return LOSSES[self.kind](logits, targets_of(batch))
        except IndexError as error:
            classes = f"in [0, {logits.shape[1]}), the classes of the model"
            raise ValueError(f"targets must be {classes}, or {IGNORED} for none: {error}") from None

    def divergence(self, outputs: Any, teacher: Any, temperature: float = 1.0) -> Tensor:
        """Return how far the answers to a batch are from a teacher's: T^2 KL(teacher / T, outputs / T), the mean."""
        return divergence(logits_of(outputs), logits_of(teacher), temperature, binary=self.kind == "binary")

    def correct(self, outputs: Any, batch: Batch) -> Tensor:
        """Count the right answers of a batch; NaN is none, and targets of -100 have none."""
        logits, targets = logits_of(outputs), targets_of(batch)
        if self.kind == "binary":
            logits, targets = logits.flatten(), targets.flatten()
            return (((logits > 0) == (targets > 0)) & ~logits.isnan()).sum()
        return ((logits.argmax(1) == targets) & ~logits.isnan().any(1)).sum()

    def evaluate(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        """Measure accuracy, loss (language: perplexity too) and the task's metrics of a model as it is deployed.

        An answer of NaN is wrong. A loss that is not finite is left out, and so are metrics that are not finite then.
        """
        self.measures.reset()
        sums = self.batch_sums(model, examples)
        return self.scores(sums, self.measures.compute())

    @timed("evaluating")
    def batch_sums(self, model: nn.Module, examples: Examples) -> list[BatchSums]:
        """Return the sums of each batch of an evaluation; metrics that are no sums take the batches."""
        found: list[BatchSums] = []
        with torch.inference_mode():
            for batch, size in self.test_batches(examples, _home(model)):
                outputs = self._answers(model, batch)
                answers = int((targets_of(batch) != IGNORED).sum()) if self.has_classes else size
                sums: dict[str, tuple[float, int]] = {}
                if self.has_classes:
                    sums["accuracy"] = int(self.correct(outputs, batch)), answers
                # The mean over no answers is NaN.
                sums["loss"] = float(self.loss(outputs, batch)) * answers if answers else 0.0, answers
                found.append(sums | self.measures.sums(outputs, batch, size))
        return found

    def test_batches(self, examples: Examples, home: Tensor) -> Iterator[tuple[Batch, int]]:
        """Yield the batches of an evaluation, moved to where `home` is, with their numbers of examples."""
        number = count(examples)
        for first in range(0, number, self.evaluation_batch):
            last = min(first + self.evaluation_batch, number)
            yield like(self.data.batch(examples, slice(first, last)), home), last - first

    @property
    def one_class_each(self) -> bool:
        """Whether each example has one class."""
        if self.kind != "classification" or self.data.described:
            return self.kind == "classification"
        return targets_of(self.data.batch(self.data.train, slice(1))).dim() == 1

    @property
    def has_classes(self) -> bool:
        """Whether answers are right or wrong: logits of classes (for a binary task, one logit)."""
        return self.kind in WITH_CLASSES

    @property
    def decider(self) -> Decider:
        """The metric that decides which model is best."""
        return self.measures.decider

    def scores(self, sums: Sequence[BatchSums], others: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return all metrics, given the sums of all batches and the metrics that are no sums."""
        if not sums or not any(one["loss"][1] for one in sums):
            raise ValueError("there are no examples to measure on")
        totals = {name: [sum(column) for column in zip(*(one[name] for one in sums), strict=True)] for name in sums[0]}
        scores = {name: total / number for name, (total, number) in totals.items()} | dict(others or {})
        scores["examples"] = float(totals["loss"][1])
        if self.kind == "language":
            scores["perplexity"] = math.exp(min(scores["loss"], 700.0))
        return self.measures.finite(scores)


def _home(model: nn.Module) -> Tensor:
    """Return a tensor of the type and on the device of a model."""
    return next(iter(model.parameters()), torch.zeros(()))


def _shapes(batch: Batch) -> str:
    """Say what a batch is made of, for errors."""
    if isinstance(batch, tuple | list) and isinstance(batch[0], Tensor):
        return f"whose inputs are {' x '.join(map(str, batch[0].shape[1:])) or 'single numbers'}"
    if isinstance(batch, Mapping):
        parts = [f"{key} {list(value.shape)}" for key, value in batch.items() if isinstance(value, Tensor)]
        return f"whose batches have the entries {', '.join(parts)}, which the model gets by name"
    return f"whose batches are of type {type(batch).__name__}"


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


def _takes_width(factory: Callable[..., nn.Module]) -> bool:
    """Return whether a factory builds its model at shares of its full width."""
    width = inspect.signature(factory).parameters.get("width")
    return width is not None and not (isinstance(width.default, int | float) and width.default > 1)
