"""What is used of Flower besides its public interface, one test each; and what of ours stands on it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from flwr.proto import control_pb2
from flwr.supercore.control import ControlHttpClient
from flwr.superlink import extensions, main

from fedfactor.flower.app import write_app
from fedfactor.flower.certificates import node_key
from fedfactor.flower.control import Control, bundle, key_bytes, user_config_to_proto
from fedfactor.flower.hosts import Attempts, Hopeless, RunFailed, refusal
from fedfactor.flower.local import Events
from fedfactor.flower.programs import DeploymentError, environment, free_port, until
from fedfactor.flower.superlink import OnlyHere
from fedfactor.run import run
from tests.deploy.running import recipe


@pytest.mark.parametrize("name", ["RegisterNode", "UnregisterNode", "ListNodes", "StartRun", "ListRuns", "StopRun"])
def test_the_control_client_has(name: str) -> None:
    assert callable(getattr(ControlHttpClient, name))
    assert hasattr(control_pb2, f"{name}Request")


@pytest.mark.parametrize("name", ["flower-superlink", "flower-supernode", "flower-superexec"])
def test_flower_has_the_command(name: str) -> None:
    (command,) = entry_points(group="console_scripts", name=name)
    assert command.dist is not None
    assert command.dist.name == "flwr"


def test_the_superlink_asks_its_extensions_for_middleware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "get_middleware", lambda: ("ours",))
    assert main._get_middleware()[0] == "ours"


def test_what_nodes_need_and_what_they_do_not_are_told_apart_by_paths() -> None:
    paths = {route.path for router in (main.fleet_router, main.control_router) for route in router.routes}  # type: ignore[attr-defined]
    for path in paths:
        assert path.startswith(("/v1/fleet/", "/v1/control/")), path


def asked(path: str, peer: str) -> list[Any]:
    """Return what the guard sends for a request, `passed on` if it lets it through."""
    sent = list[Any]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("passed on")

    async def send(message: Any) -> None:
        sent.append(message.get("status"))

    asyncio.run(OnlyHere(app)({"type": "http", "path": path, "client": (peer, 1)}, None, send))
    return sent


def test_other_machines_get_what_nodes_need_alone() -> None:
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/fleet", "/"):
        assert asked(path, "192.0.2.7")[0] == 403
        assert asked(path, "127.0.0.1") == asked(path, "::1") == ["passed on"]
    for path in ("/v1/fleet/pull-messages", "/health"):
        assert asked(path, "192.0.2.7") == ["passed on"]


def test_an_app_is_packed(tmp_path: Path) -> None:
    app = write_app(recipe(), tmp_path / "app", tmp_path / "run")
    packed = bundle(app)
    assert "pyproject.toml" in zipfile.ZipFile(io.BytesIO(packed.content)).namelist()
    assert packed.hash_str == hashlib.sha256(packed.content).hexdigest()
    assert user_config_to_proto({"a": 1, "b": "x"})["a"].sint64 == 1


def test_keys_are_read_and_others_named(tmp_path: Path) -> None:
    public = node_key(tmp_path / "one")
    assert len(key_bytes(public)) > 50
    (tmp_path / "two.pub").write_text("nonsense")
    with pytest.raises(DeploymentError, match=r"two\.pub is no public key of a node"):
        key_bytes(tmp_path / "two.pub")


def test_a_server_that_is_not_there_is_named() -> None:
    port = free_port()
    with Control(f"127.0.0.1:{port}", None) as control:
        assert not control.answers()
        with pytest.raises(DeploymentError, match=f"no answer from a SuperLink at 127.0.0.1:{port}"):
            control.nodes()


def test_reasons_are_told_in_words() -> None:
    key = Path("node.key")
    false = refusal("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed (_ssl.c:1)", "a:1", key)
    assert isinstance(false, Hopeless)
    assert "a:1" in false
    stranger = refusal("Exit Code: 305\n[code: 2004] Failed to activate SuperNode.", "a:1", key)
    assert not isinstance(stranger, Hopeless)
    assert "node.key.pub" in stranger
    assert refusal("one\ntwo", "a:1", key) == "the node ended: one | two"


def test_flowers_programs_report_to_nobody_and_write_where_they_should(tmp_path: Path) -> None:
    found = environment(tmp_path)
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert found["FLWR_HOME"] == found["TMPDIR"] == str(tmp_path)
    assert "127.0.0.1" in found["NO_PROXY"]


def test_waiting_ends() -> None:
    with pytest.raises(DeploymentError, match=r"tea took more than 0\.2 seconds"):
        until(lambda: False, 0.2, "tea")


def test_a_run_that_gets_further_may_fail_as_often_as_it_likes(tmp_path: Path) -> None:
    attempts, pointer = Attempts(tmp_path), tmp_path / "checkpoint" / "current"
    pointer.parent.mkdir()
    for round in range(10):
        pointer.write_text(f"round-{round}")
        attempts.count()
        attempts.count()
    attempts.count()
    attempts.reason = "no quorum"
    with pytest.raises(RunFailed, match="3 times without getting beyond round 9: no quorum"):
        attempts.count()


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
