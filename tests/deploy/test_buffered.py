"""Buffered rounds of real nodes, by real arrival; the server is stopped while clients train, and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedfactor import load
from fedfactor.runs.flower.app import write_app
from fedfactor.runs.flower.local import Deployment, committed
from fedfactor.runs.recipe import resolve
from tests.helpers.deployment import events, finish, recipe, wait_for

pytestmark = pytest.mark.deploy


def test_each_job_ends_once_although_the_server_is_stopped(deployment: Deployment, tmp_path: Path) -> None:
    tables = {**recipe("pfedpara", rounds=5).tables, "rounds": {"mode": "buffered", "buffer": 2}}
    one = resolve(tables, "a test")
    app = write_app(one, tmp_path / "app", tmp_path / "run", config={"poll": 0.2})
    stopped = deployment.control.start(app, {})
    wait_for(lambda: committed(tmp_path / "run") >= 2, 400, "the second step")
    deployment.control.stop(stopped)
    wait_for(lambda: deployment.control.progress(stopped).finished, 60, "the end of the server")
    before = committed(tmp_path / "run")
    assert before < 5
    finish(deployment, deployment.control.start(app, {}))

    training: set[int] = set()
    found = events(tmp_path / "run")
    for event in found:
        if event["round"] == before + 1:
            training = set()  # a resumed server starts new clients
        step, started, failed = event["buffered"], {*event["cohort"]}, {one["client"] for one in event["failures"]}
        assert not training & started
        assert len(step["clients"]) == 2 and {*step["clients"]} <= training | started
        training = (training | started) - {*step["clients"]} - failed
        assert step["training"] == sorted(training)
        assert event["bytes_up"] > 0 and max(step["ages"]) < event["round"]
    assert any(age for event in found for age in event["buffered"]["ages"]), "somebody answered an earlier model"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["failures"] == 0
    assert load(tmp_path / "run").metrics[-1]["round"] == 5
