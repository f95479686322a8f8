"""Metrics: what a model's outputs are measured by, and which figure decides between two models."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedfactor.data.batches import Batch, targets_of
from fedfactor.support.checks import near
from fedfactor.task.objective import logits_of


@runtime_checkable
class Accumulating(Protocol):
    """A metric that is not a mean over examples, with the methods of torchmetrics' metrics."""

    def reset(self) -> None:
        """Forget all batches."""
        ...

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Take a batch."""
        ...

    def compute(self) -> Any:
        """Return the figure of all batches since the last `reset`."""
        ...


Metric = Callable[[Any, Batch], Any] | Accumulating | str
"""A function of the outputs and the batch, which returns one value per example or their mean; an object with
torchmetrics' methods; or the name of a built-in metric."""


@dataclass(frozen=True)
class Decider:
    """The metric that decides which of two models is better."""

    name: str
    higher_is_better: bool

    @classmethod
    def read(cls, noted: Mapping[str, Any]) -> Decider:
        """Return the decider from a run's first event or summary; in runs of earlier versions it was the accuracy."""
        return cls(**noted["metric"]) if "metric" in noted else ACCURACY

    def __str__(self) -> str:
        """Return the name and the direction."""
        return f"{self.name} ({'higher' if self.higher_is_better else 'lower'} is better)"

    @property
    def title(self) -> str:
        """The name as the first word of a sentence."""
        return self.name[0].upper() + self.name[1:]

    @property
    def best(self) -> str:
        """Which values are best, in a word."""
        return "highest" if self.higher_is_better else "lowest"

    @property
    def worst(self) -> str:
        """Which values are worst, in a word."""
        return "lowest" if self.higher_is_better else "highest"

    @property
    def is_share(self) -> bool:
        """Whether values are shares in [0, 1], which are written in percent."""
        return self.name.endswith("accuracy")

    def text(self, value: float | None, digits: int = 2) -> str:
        """Format a value: a share in percent with this many digits, another metric with four significant digits."""
        if value is None:
            return "-"
        return f"{100 * value:.{digits}f} %" if self.is_share else f"{value:.4g}"

    def number(self, value: float) -> str:
        """Format a value without a unit, for a line of text."""
        return f"{value:.3f}" if self.is_share else f"{value:.4g}"

    def goodness(self, value: float) -> float:
        """Return a number that is the larger, the better the value is."""
        return value if self.higher_is_better else -value

    def metrics(self, scores: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics in a measurement, at the largest capacity if there are several."""
        largest = scores if self.name in scores else scores[max(scores, key=float)]
        return {name: float(value) for name, value in largest.items() if name not in TAKEN}

    def of(self, scores: Mapping[str, Any]) -> float:
        """Return the value in a measurement, at the largest capacity if there are several."""
        return self.metrics(scores)[self.name]

    def check_target(self, target: float | None) -> None:
        """Raise ValueError if the metric cannot have this value."""
        low, high = (0.0, 1.0) if self.is_share else (-sys.float_info.max, sys.float_info.max)
        if target is not None and not low <= target <= high:
            raise ValueError(
                f"target must be {'in [0, 1]' if self.is_share else 'finite'} as {self.name} is, got {target}"
            )


ACCURACY, LOSS = Decider("accuracy", True), Decider("loss", False)
WITH_CLASSES = ("classification", "binary", "language")
"""Kinds of tasks that have an accuracy, which decides if nothing is said. For other kinds it is the loss."""
TAKEN = ("examples", "std", "worst_decile", "at", "clients", "each", "who")
"""Names that measurements use for other figures."""


def _mean_absolute_error(outputs: Any, batch: Batch) -> Tensor:
    return _errors(outputs, batch).abs().mean(1)


def _mean_squared_error(outputs: Any, batch: Batch) -> Tensor:
    return _errors(outputs, batch).square().mean(1)


def _errors(outputs: Any, batch: Batch) -> Tensor:
    """Return the differences of a batch, one row per example."""
    targets = targets_of(batch)
    return (logits_of(outputs).reshape(targets.shape) - targets).reshape(len(targets), -1)


BUILT_IN: Mapping[str, Callable[[Any, Batch], Tensor]] = {"mae": _mean_absolute_error, "mse": _mean_squared_error}
"""Metrics of regressions by name; lower values are better."""


class Metrics:
    """The metrics that a task has beside those of its kind, and its decider."""

    def __init__(
        self,
        kind: str,
        given: Mapping[str, Metric] | Sequence[str] = (),
        best: str | None = None,
        higher_is_better: bool | None = None,
    ) -> None:
        self._kind = kind
        named = _named(given, kind)
        self.written = {name: _text(metric) for name, metric in named.items()}
        """The given metrics as text, for a recipe."""
        self._given = {name: BUILT_IN[one] if isinstance(one, str) else one for name, one in named.items()}
        self._functions = {name: one for name, one in self._given.items() if not isinstance(one, Accumulating)}
        self._accumulating = {name: one for name, one in self._given.items() if isinstance(one, Accumulating)}
        self.names = [*_names(kind), *self._given]
        """All figures of an evaluation except the number of examples."""
        self.decider = self._decider(best, higher_is_better)

    def _decider(self, best: str | None, higher_is_better: bool | None) -> Decider:
        if not best:
            if higher_is_better is not None:
                raise ValueError("higher_is_better says how to read the metric that `best` names; give `best` too")
            return ACCURACY if self._kind in WITH_CLASSES else LOSS
        if best not in self.names:
            there = ", ".join(self.names)
            raise ValueError(f"best: the task has no metric {best!r}; {near(best, self.names)}there are {there}")
        # torchmetrics' metrics know it; the loss, perplexity and the built-in metrics are errors.
        errors = {"loss", "perplexity", *(name for name, text in self.written.items() if text in BUILT_IN)}
        ways = {"accuracy": True, **dict.fromkeys(errors, False)}
        known = ways.get(best, getattr(self._given.get(best), "higher_is_better", None))
        if isinstance(known, bool) and higher_is_better not in (None, known):
            better = "higher" if known else "lower"
            raise ValueError(f"{better} values of {best!r} are better; leave out higher_is_better")
        if higher_is_better is None:
            higher_is_better = known
        if not isinstance(higher_is_better, bool):
            raise ValueError(f"say with higher_is_better = true or false how to read {best!r}, which decides the best")
        return Decider(best, higher_is_better)

    @property
    def accumulate(self) -> bool:
        """Whether a metric needs all batches in one process."""
        return bool(self._accumulating)

    def check(self, outputs: Any, batch: Batch, examples: int) -> None:
        """Raise ValueError if a metric cannot take a batch, or if it returns something else than numbers."""
        self.reset()
        self.sums(outputs, batch, examples)
        self.reset()

    def reset(self) -> None:
        """Forget the batches of an earlier evaluation."""
        for metric in self._accumulating.values():
            metric.reset()

    def sums(self, outputs: Any, batch: Batch, examples: int) -> dict[str, tuple[float, int]]:
        """Return sum and count of each metric that is a mean over examples; the others take the batch."""
        found = {
            name: (_sum(name, _tried(name, metric, outputs, batch), examples), examples)
            for name, metric in self._functions.items()
        }
        if self._accumulating:
            preds, target = self._answers(outputs, batch)
            for name, metric in self._accumulating.items():
                _tried(name, metric.update, preds, target)
        return found

    def compute(self) -> dict[str, float]:
        """Return the metrics that are no means over examples, of all batches since `reset`."""
        return {name: _number(name, _tried(name, metric.compute)) for name, metric in self._accumulating.items()}

    def finite(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the scores that are finite. Raise ValueError if a given metric is not finite although the loss is."""
        for name in self._given:
            if not math.isfinite(scores[name]) and math.isfinite(scores["loss"]):
                raise ValueError(
                    f"metric {name!r} is {scores[name]} although the loss is finite: return a number for all data, "
                    "such as 0 where the metric is not defined"
                )
        return {name: score for name, score in scores.items() if math.isfinite(score)}

    def _answers(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return predictions and targets as torchmetrics takes them: probabilities where there are classes.

        torchmetrics takes logits too, but looks at each batch to tell them from probabilities.
        """
        preds, target = logits_of(outputs).cpu(), targets_of(batch).cpu()
        if self._kind == "binary":
            shape = target.shape if target[0].numel() > 1 else (-1,)  # labels per example: one or several
            return preds.float().reshape(shape).sigmoid(), target.reshape(shape).long()
        if self._kind in WITH_CLASSES:
            return preds.float().softmax(1), target
        return preds.reshape(target.shape) if preds.numel() == target.numel() else preds, target


def _names(kind: str) -> list[str]:
    """Return the metrics that all tasks of a kind have."""
    return ["accuracy"] * (kind in WITH_CLASSES) + ["loss"] + ["perplexity"] * (kind == "language")


def _named(given: Mapping[str, Metric] | Sequence[str], kind: str) -> dict[str, Any]:
    """Return the given metrics by name. Raise ValueError or TypeError if a name or a metric is not usable."""
    if isinstance(given, str) or not isinstance(given, Mapping | Sequence):
        raise TypeError(f"metrics must be a mapping from names to metrics, got {given!r}")
    found: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {name: name for name in given}
    for name, metric in found.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][\w-]*", name):
            raise ValueError(f"the name of a metric has letters, digits, _ and -, and begins with a letter: {name!r}")
        if name in (*TAKEN, *_names(kind)):
            raise ValueError(f"a metric cannot have the name {name!r}: it is the name of another figure")
        if isinstance(metric, str):
            if metric not in BUILT_IN:
                there = ", ".join(BUILT_IN)
                raise ValueError(f"there is no built-in metric {metric!r}; {near(metric, BUILT_IN)}there are {there}")
        elif isinstance(metric, type) or not (callable(metric) or isinstance(metric, Accumulating)):
            raise TypeError(
                f"metric {name!r} must be a function of (outputs, batch), or an object with update, compute and reset "
                f"as torchmetrics' have, got {metric!r}"
            )
    return found


def _text(metric: Any) -> str:
    if isinstance(metric, str):
        return metric
    named = metric if hasattr(metric, "__qualname__") else type(metric)
    return f"{named.__module__}:{named.__qualname__}"


def _tried(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a user's function. Raise ValueError, which names the metric, if it raises anything."""
    try:
        return function(*args)
    except Exception as error:
        raise ValueError(f"metric {name!r} failed: {type(error).__name__}: {error}") from error


def _sum(name: str, found: Any, examples: int) -> float:
    """Return the sum over the examples of a batch of what a function returned."""
    try:
        values = torch.as_tensor(found, device="cpu").double().flatten()
    except (TypeError, ValueError, RuntimeError):
        values = torch.empty(0)
    if len(values) not in (1, examples):
        got = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
        raise ValueError(f"metric {name!r} must return one value per example ({examples}) or their mean, got {got}")
    return float(values.sum()) if len(values) == examples else float(values) * examples


def _number(name: str, found: Any) -> float:
    """Return what `compute` returned as a number."""
    if isinstance(found, Mapping) or getattr(found, "numel", lambda: 1)() != 1:
        raise ValueError(f"metric {name!r} must compute one number, got {found!r}; choose an average over classes")
    try:
        return float(found)
    except (TypeError, ValueError):
        raise ValueError(f"metric {name!r} must compute a number, got {found!r}") from None
