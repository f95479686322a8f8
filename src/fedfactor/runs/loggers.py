"""Events of a run for other people's viewers: TensorBoard and MLflow, each written by its own library."""

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

Event = dict[str, Any]


class Logger(Protocol):
    """Takes the numbers of rounds and puts them somewhere."""

    def has_begun(self) -> bool:
        """Tell whether an earlier process has written rounds of this run already."""
        ...

    def carry_on(self, round: int) -> None:
        """Make ready for the rounds after this one."""
        ...

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a round."""
        ...

    def close(self, finished: bool) -> None:
        """Write out what is held back; `finished` if the run came to its end."""
        ...


@register("loggers", "tensorboard")
class TensorBoard:
    """Scalars for TensorBoard, in `tensorboard` of the run directory."""

    def __init__(self, directory: Path, name: str, recipe: Mapping[str, Any]) -> None:
        self._writers = _module("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self._folder, self._recipe = directory / "tensorboard", recipe
        self._writer: Any = None

    def has_begun(self) -> bool:
        """Tell whether there is a file already."""
        return any(self._folder.glob("events.out.tfevents.*"))

    def carry_on(self, round: int) -> None:
        """Open a new file; of rounds after this one, earlier files no longer count."""
        self._writer = self._writers.SummaryWriter(str(self._folder), purge_step=round + 1 if round else None)
        if round == 0:
            text = json.dumps(self._recipe, indent=1, default=str)
            self._writer.add_text("recipe", f"```\n{text}\n```")

    def write(self, round: int, numbers: Mapping[str, float]) -> None:
        """Add a scalar a number; names that begin alike share a group."""
        for name, value in numbers.items():
            self._writer.add_scalar(name.replace(".", "/", 1), value, round)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


@register("loggers", "mlflow")
class MLflow:
    """Parameters and metrics for MLflow, wherever it is set up to track (`MLFLOW_TRACKING_URI`).

    The experiment has the recipe's name; `mlflow.json` in the run directory notes where the run is tracked.
    """

    def __init__(self, directory: Path, name: str, recipe: Mapping[str, Any]) -> None:
        self._mlflow = _module("mlflow", "mlflow", "mlflow")
        self._note, self._name, self._recipe = directory / "mlflow.json", name, recipe
        self._client: Any = None
        self._run = ""

    def has_begun(self) -> bool:
        """Tell whether a run was opened already."""
        return self._note.exists()

    def carry_on(self, round: int) -> None:
        """Open the run that was noted, or a new one."""
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
        """Log a metric a number."""
        for name, value in numbers.items():
            self._client.log_metric(self._run, name, value, step=round)

    def close(self, finished: bool) -> None:
        """Mark the run as over, or as one that can be carried on."""
        if self._client is not None:
            self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


LONGEST_PARAMETER = 500
"""Characters of a parameter that every MLflow server takes."""


@contextmanager
def logging(
    names: Sequence[str], directory: Path, name: str, recipe: Mapping[str, Any]
) -> Iterator[Callable[[Event], None]]:
    """Give a listener that passes a run's events on to the loggers of these names, and closes them in the end."""
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
    """Raise a sentence if there is no such logger, or its library is not installed."""
    for name in names:
        get("loggers", name).target(Path(), "", {})


def _tell(logger: Logger, event: Event) -> None:
    if event["event"] == "start":
        logger.carry_on(0)
    elif event["event"] == "resumed":
        fresh = not logger.has_begun()
        logger.carry_on(0 if fresh else event["round"])
        for past in event["past"] if fresh else ():  # the logger was asked for only now
            _tell_round(logger, past)
    _tell_round(logger, event)


def _tell_round(logger: Logger, event: Event) -> None:
    if event["event"] == "round":
        logger.write(event["round"], numbers_of(event))


def numbers_of(event: Event) -> dict[str, float]:
    """Return the numbers of a round by dotted names; lists, and who took part, stay in `metrics.jsonl`."""
    found = flat({key: value for key, value in event.items() if key not in ("event", "round")})
    numbers = {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
    numbers["failures"] = float(len(event["failures"]))
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _module(name: str, library: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"--log {extra} needs the package {library} ({error}); install it with pip install 'fedfactor[{extra}]'"
        ) from None
