"""Loggers write with their own libraries, and those read it back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fedfactor.runs import loggers
from tests.helpers.events import round_event

RECIPE = {"name": "demo", "train": {"lr": 0.1, "seed": 3}}


def events(*rounds: int) -> list[dict[str, Any]]:
    return [round_event(number, number / 10) for number in rounds]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), purge_orphaned_data=True)
    found.Reload()
    return {
        tag: [(one.step, pytest.approx(one.value)) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }


def test_numbers_of_a_round_have_dotted_names() -> None:
    numbers = loggers.numbers_of(round_event(3, 0.25, failed=2) | {"observed": {"rank": {"conv": 4.5}, "gram": [1]}})
    assert numbers["global.1.accuracy"] == 0.25 and numbers["totals.bytes_up"] == 3000
    assert numbers["observed.rank.conv"] == 4.5 and numbers["failures"] == 2
    assert not {"event", "round", "cohort", "observed.gram"} & set(numbers)


def test_tensorboard_reads_what_was_written_also_after_a_resume(tmp_path: Path) -> None:
    with loggers.logging(["tensorboard"], tmp_path, "one", RECIPE) as listen:
        for event in [{"event": "start"}, *events(1, 2, 3)]:
            listen(event)
    assert scalars(tmp_path / "tensorboard")["global/1.accuracy"] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    with loggers.logging(["tensorboard"], tmp_path, "one", RECIPE) as listen:  # round 3 was never committed
        listen({"event": "resumed", "round": 2, "past": [{"event": "start"}, *events(1, 2)]})
        for event in events(3, 4):
            listen(event)
    assert scalars(tmp_path / "tensorboard")["global/1.accuracy"] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]


def test_a_logger_asked_for_at_a_resume_gets_the_past_too(tmp_path: Path) -> None:
    with loggers.logging(["tensorboard"], tmp_path, "one", RECIPE) as listen:
        listen({"event": "resumed", "round": 2, "past": [{"event": "start"}, *events(1, 2)]})
        listen(events(3)[0])
    assert scalars(tmp_path / "tensorboard")["loss"] == [(1, 0.5), (2, 0.5), (3, 0.5)]


@pytest.mark.mlflow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own, of the libraries that it uses
def test_mlflow_reads_what_was_written_also_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    with pytest.raises(KeyboardInterrupt), loggers.logging(["mlflow"], tmp_path, "one", RECIPE) as listen:
        for event in [{"event": "start"}, *events(1, 2)]:
            listen(event)
        raise KeyboardInterrupt
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
    assert run.info.status == "KILLED" and run.info.run_name == "one"
    assert run.data.params == {"name": "demo", "train.lr": "0.1", "train.seed": "3"}
    with loggers.logging(["mlflow"], tmp_path, "one", RECIPE) as listen:
        listen({"event": "resumed", "round": 2, "past": [{"event": "start"}, *events(1, 2)]})
        listen(events(3)[0])
    history = client.get_metric_history(run.info.run_id, "global.1.accuracy")
    assert [(one.step, one.value) for one in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert client.get_run(run.info.run_id).info.status == "FINISHED"


def test_an_unknown_logger_and_a_missing_library_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no logger is called 'wandb'; there are mlflow, tensorboard"):
        loggers.check(["wandb"])
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ValueError, match=r"--log mlflow needs the package mlflow .*pip install .*\[mlflow\]'"):
        loggers.check(["mlflow"])
