"""One real deployment: TLS, node keys, a liar among the clients, a stranger at the door; and events of another process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedfactor.engines.flower.certificates import node_key
from fedfactor.runs.execute import run
from fedfactor.runs.flower.hosts import refusal
from fedfactor.runs.flower.local import Deployment, Events
from tests.helpers.deployment import events, finish, inline, listening, lying, own_processes, recipe, wait_for


def test_a_run_over_tls_with_a_liar_and_a_stranger(tmp_path: Path) -> None:
    from fedfactor.runs.flower.app import write_app

    one, directory, before = recipe("fedpara", rounds=1, clients=2), tmp_path / "run", own_processes()
    with Deployment(tmp_path / "flower") as deployment:
        app = write_app(one, tmp_path / "app", directory, config={"poll": 0.2})
        run = deployment.control.start(app, {})
        deployment.join("0", {"client": 0, "state-dir": str(tmp_path / "states")})
        with lying("nan"):
            deployment.join("1", {"client": 1, "state-dir": str(tmp_path / "states")})
        key = tmp_path / "stranger"
        node_key(key)
        stranger = deployment.join("stranger", {"client": 0, "state-dir": str(tmp_path / "states")}, key)
        refused = stranger.program
        stranger.stop_restarting()
        finish(deployment, run, 600)
        assert refused is not None
        wait_for(lambda: refused.code is not None, 120, "the refusal")
        reason = refusal(refused.output(), deployment.address, key)
        port = deployment.port
    assert reason.startswith(
        f"the server at 127.0.0.1:{port} does not accept this node's key: either stranger.pub is not"
    )

    (event,) = events(directory)
    ((client, words),) = [(failure["client"], failure["reason"]) for failure in event["failures"]]
    assert client == 1
    assert "holds NaN" in words
    found = json.loads((directory / "summary.json").read_text())
    assert found["failures"] == 1
    assert found["weights_sha256"] == inline(one, without=[1])["weights_sha256"] != inline(one)["weights_sha256"]

    assert own_processes() <= before
    assert not listening(port)
    assert not (tmp_path / "flower").exists()


def test_commits_of_another_process_are_told_as_our_own_would_be(tmp_path: Path) -> None:
    here, there = list[Any](), list[Any]()
    one = recipe("fedavg", rounds=2)
    watching = Events(tmp_path)

    def hear(event: dict[str, Any]) -> None:
        if event["event"] != "answered":  # which is told on the way, and not kept
            here.append(event)
        there.extend(watching.new())

    run(one, tmp_path, on_event=hear)
    assert there == here
    assert [event["event"] for event in here] == ["start", "committed", "round", "committed", "round", "committed"]
    (resumed,) = Events(tmp_path).new()
    assert resumed["event"] == "resumed"
    assert resumed["round"] == 2
    assert resumed["past"] == [event for event in here if event["event"] != "committed"]
