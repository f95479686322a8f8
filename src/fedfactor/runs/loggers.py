"""Loggers that write the events of a run to TensorBoard or MLflow, with their own libraries."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fedfactor.registry import get, register
from fedfactor.runs.open import flat
from fedfactor.support.install import install_command

Event = dict[str, Any]


class Logger(Protocol):
    """Writes the numbers of rounds to another tool."""

    def has_begun(self) -> bool:
        """Return whether an earlier process has already written rounds of this run."""
        ...

    def open(self, round: int) -> None:
        """Open the log for the rounds after this one; 0 is the start of a run."""
        ...

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a round."""
        ...

    def close(self, finished: bool) -> None:
        """Write buffered numbers and close; `finished` says whether the run is complete."""
        ...


@register("loggers", "tensorboard")
class TensorBoard:
    """Scalars for TensorBoard, in the folder `tensorboard` of the run directory."""

    def __init__(self, directory: Path, name: str, recipe: Mapping[str, Any]) -> None:
        self._writers = _module("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self._folder, self._recipe = directory / "tensorboard", recipe
        self._writer: Any = None

    def has_begun(self) -> bool:
        """Return whether there is already an event file."""
        return any(self._folder.glob("events.out.tfevents.*"))

    def open(self, round: int) -> None:
        """Open a new file; TensorBoard then ignores later rounds in earlier files."""
        self._writer = self._writers.SummaryWriter(str(self._folder), purge_step=round + 1 if round else None)
        if round == 0:
            text = json.dumps(self._recipe, indent=1, default=str)
            self._writer.add_text("recipe", f"```\n{text}\n```")

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        """Add one scalar per number; names with the same first part share a group."""
        for name, value in numbers.items():
            self._writer.add_scalar(name.replace(".", "/", 1), value, round)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


@register("loggers", "mlflow")
class MLflow:
    """Parameters and metrics for MLflow, at its configured tracking server (`MLFLOW_TRACKING_URI`).

    The experiment has the recipe's name; `mlflow.json` in the run directory records where the run is tracked.
    """

    def __init__(self, directory: Path, name: str, recipe: Mapping[str, Any]) -> None:
        self._mlflow = _module("mlflow", "mlflow", "mlflow")
        self._note, self._name, self._recipe = directory / "mlflow.json", name, recipe
        self._client: Any = None
        self._run = ""

    def has_begun(self) -> bool:
        """Return whether an MLflow run exists already."""
        return self._note.exists()

    def open(self, round: int) -> None:
        """Reopen the recorded MLflow run, or create one."""
        if self.has_begun():
            noted = json.loads(self._note.read_text())
            self._client, self._run = self._mlflow.MlflowClient(noted["tracking_uri"]), noted["run_id"]
            self._client.update_run(self._run, "RUNNING")
            return
        uri = self._mlflow.get_tracking_uri()
        self._client = self._mlflow.MlflowClient(uri)
        title = str(self._recipe["name"])
        found = self._client.get_experiment_by_name(title)
        experiment = found.experiment_id if found else self._client.create_experiment(title)
        self._run = self._client.create_run(experiment, run_name=self._name).info.run_id
        for key, value in flat(self._recipe).items():
            self._client.log_param(self._run, key, str(value)[:LONGEST_PARAMETER])
        self._note.write_text(json.dumps({"tracking_uri": uri, "run_id": self._run}))

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        """Log one metric per number."""
        for name, value in numbers.items():
            self._client.log_metric(self._run, name, value, step=round)

    def close(self, finished: bool) -> None:
        """Mark the MLflow run as finished, or as killed if it can be resumed."""
        if self._client is not None:
            self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


LONGEST_PARAMETER = 500
"""Number of characters per parameter that all MLflow servers accept."""


@contextmanager
def logging(
    names: Sequence[str], directory: Path, name: str, recipe: Mapping[str, Any]
) -> Iterator[Callable[[Event], None]]:
    """Yield a listener that passes a run's events to the named loggers; close them at the end."""
    loggers: list[Logger] = [get("loggers", one).target(directory, name, recipe) for one in names]

    def listen(event: Event) -> None:
        for logger in loggers:
            _tell(logger, event)

    finished = False
    try:
        yield listen
        finished = True
    finally:
        for logger in loggers:
            logger.close(finished)


def check(names: Sequence[str]) -> None:
    """Raise ValueError if there is no such logger, or its library is not installed."""
    for name in names:
        get("loggers", name).target(Path(), "", {})


def _tell(logger: Logger, event: Event) -> None:
    if event["event"] == "start":
        logger.open(0)
    elif event["event"] == "resumed":
        fresh = not logger.has_begun()
        logger.open(0 if fresh else event["round"])
        for past in event["past"] if fresh else ():  # this logger was not used when the run started
            _tell_round(logger, past)
    _tell_round(logger, event)


def _tell_round(logger: Logger, event: Event) -> None:
    if event["event"] == "round":
        logger.write(event["round"], numbers_of(event))


def numbers_of(event: Event) -> dict[str, float]:
    """Return the numbers of a round by dotted names, without its lists, which are only in `metrics.jsonl`."""
    found = flat({key: value for key, value in event.items() if key not in ("event", "round")})
    numbers = {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
    numbers["failures"] = float(len(event["failures"]))
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _module(name: str, library: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"--log {extra} needs the package {library} ({error}); install it with {install_command(extra)}"
        ) from None
