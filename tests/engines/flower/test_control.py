"""What is used of Flower besides its public interface, one test each; and what of ours stands on it."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import io
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.constant import Status, SubStatus
from flwr.proto import control_pb2
from flwr.proto.federation_config_pb2 import SimulationConfig
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.run_pb2 import Run, RunStatus
from flwr.supercore.constant import NodeStatus
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.superlink import main
from typer.testing import CliRunner

from fedfactor.cli.flower import app as commands
from fedfactor.engines.flower import superlink
from fedfactor.engines.flower.adapter import QUIET
from fedfactor.engines.flower.certificates import Certificates, node_key
from fedfactor.engines.flower.control import Control, NoAnswer, RegisteredNode, bundle, key_bytes, user_config_to_proto
from fedfactor.engines.flower.programs import (
    DeploymentError,
    environment,
    free_port,
    node_command,
    superlink_command,
    until,
)
from fedfactor.runs.execute import run
from fedfactor.runs.flower.app import write_app
from fedfactor.runs.flower.hosts import Attempts, Hopeless, Keys, RunFailed, refusal
from fedfactor.runs.flower.local import Events
from tests.helpers.deployment import recipe


@pytest.mark.parametrize("name", ["RegisterNode", "UnregisterNode", "ListNodes", "StartRun", "ListRuns", "StopRun"])
def test_the_control_client_has(name: str) -> None:
    assert callable(getattr(ControlHttpClient, name))
    assert hasattr(control_pb2, f"{name}Request")


@pytest.mark.parametrize("name", ["flower-superlink", "flower-supernode", "flower-superexec"])
def test_flower_has_the_command(name: str) -> None:
    (command,) = entry_points(group="console_scripts", name=name)
    assert command.dist is not None
    assert command.dist.name == "flwr"


# By name: functions of the same names hide the modules.
SUPERLINK = importlib.import_module("flwr.superlink.cli.flower_superlink")
SUPERNODE = importlib.import_module("flwr.supernode.cli.flower_supernode")
SUPEREXEC = importlib.import_module("flwr.supercore.cli.flower_superexec")


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {word for action in parser._actions for word in action.option_strings}


def test_flowers_commands_have_the_options_we_give_them(tmp_path: Path) -> None:
    files = Certificates(tmp_path / "ca.crt", tmp_path / "server.crt", tmp_path / "server.key")
    link = superlink_command("127.0.0.1", 1, files) + superlink_command("127.0.0.1", 1, None)
    link += ["--database", "--isolation", "--superexec-auth-secret-file", "--simulation"]
    node = node_command("127.0.0.1:1", files.authority, files.key, 2, {"client": 0})
    execute = ["--runtime-api-address", "--root-certificates", "--superexec-auth-secret-file"]
    for words, parser in [
        (link, SUPERLINK._parse_args_run_superlink()),
        (node, SUPERNODE._parse_args_run_supernode()),
        (execute, SUPEREXEC._parse_args()),
    ]:
        assert {word for word in words if word.startswith("--")} <= options(parser)


def test_nothing_is_installed_if_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    assert SUPERLINK._runtime_dependency_install_default() is False


def test_how_runs_and_nodes_go_is_told_in_the_words_we_know() -> None:
    assert (Status.FINISHED, SubStatus.COMPLETED) == ("finished", "completed")
    assert (NodeStatus.ONLINE, NodeStatus.UNREGISTERED) == ("online", "unregistered")
    assert {"status", "bytes_sent", "bytes_recv"} <= set(Run.DESCRIPTOR.fields_by_name)
    assert {"status", "sub_status", "details"} <= set(RunStatus.DESCRIPTOR.fields_by_name)
    assert {"node_id", "name", "status", "public_key"} <= set(NodeInfo.DESCRIPTOR.fields_by_name)


def test_a_simulation_is_told_its_nodes_and_what_each_needs() -> None:
    wanted = {"num_supernodes", "client_resources_num_cpus", "client_resources_num_gpus"}
    assert wanted <= set(SimulationConfig.DESCRIPTOR.fields_by_name)


def test_refusals_come_with_a_reason_and_a_node_is_refused_by_this_number() -> None:
    told = FlowerError.from_json('{"code": 7, "detail": "no", "extra": "because"}')
    assert told is not None
    assert (told.message, told.public_details) == ("no", "because")
    assert FlowerError.from_json("<html>") is None
    assert ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED == 2004


@pytest.mark.parametrize(("code", "expected"), [(500, NoAnswer), (403, DeploymentError)])
def test_a_superlink_that_fails_is_asked_again_and_one_that_refuses_is_not(
    code: int, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(client: Any, request: Any) -> None:
        answer = httpx.Response(code, request=httpx.Request("POST", "http://a"), text='{"code": 1, "detail": "no"}')
        answer.raise_for_status()

    monkeypatch.setattr(ControlHttpClient, "ListNodes", ask)
    with Control("127.0.0.1:1", None) as control, pytest.raises(DeploymentError) as caught:
        control.nodes()
    assert type(caught.value) is expected


def test_the_superlink_is_served_behind_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    served: dict[str, Any] = {}
    monkeypatch.setattr(sys, "argv", ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", "1"])
    monkeypatch.setattr("uvicorn.run", lambda app, **options: served.update(options, app=app))
    superlink.main()
    assert isinstance(served.pop("app"), superlink.LocalOnly)
    assert served == {"host": "127.0.0.1", "port": 1, "ssl_keyfile": None, "ssl_certfile": None}


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

    asyncio.run(superlink.LocalOnly(app)({"type": "http", "path": path, "client": (peer, 1)}, None, send))
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
    with pytest.raises(DeploymentError, match=r"two\.pub is not the public key of a node"):
        key_bytes(tmp_path / "two.pub")


class Door:
    """A SuperLink's list of those who may join."""

    def __init__(self) -> None:
        self.known: list[RegisteredNode] = []

    def nodes(self) -> list[RegisteredNode]:
        return list(self.known)

    def register(self, public_key: Path, name: str) -> int:
        if name == "refused":
            raise DeploymentError("the SuperLink refused RegisterNode")
        self.known.append(RegisteredNode(len(self.known), name, "registered", key_bytes(public_key)))
        return len(self.known)

    def unregister(self, node: int) -> None:
        self.known = [one for one in self.known if one.id != node]


def test_keys_in_the_folder_may_join_and_one_that_is_none_keeps_nobody_out(tmp_path: Path) -> None:
    keys, door = Keys(tmp_path), Door()
    control = cast(Control, door)
    for name in ("a", "b", "refused"):
        node_key(tmp_path / name)
    (tmp_path / "c.pub").write_text("nonsense")
    changes = keys.admit(control)
    assert changes[:2] == ["a may join", "b may join"]
    assert "c.pub is not the public key of a node" in changes[2]
    assert changes[3:] == ["the SuperLink refused RegisterNode"]
    assert keys.admit(control) == [], "said once"
    (tmp_path / "a.pub").write_text("half a k")  # as while it is copied again
    assert len(keys.admit(control)) == 1
    assert [node.name for node in door.known] == ["a", "b"]
    (tmp_path / "b.pub").unlink()
    assert keys.admit(control) == ["b may no longer join"]


def test_keys_of_other_kinds_are_refused(tmp_path: Path) -> None:
    public = ed25519.Ed25519PrivateKey.generate().public_key()
    (tmp_path / "a.pub").write_bytes(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    with pytest.raises(DeploymentError, match="elliptic curves only"):
        key_bytes(tmp_path / "a.pub")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["status", "--site", "nowhere"], "nowhere/ca.crt does not exist"),
        (["up", "r.toml", "--out", "run"], "give the name or address under which nodes reach this machine"),
        (
            ["up", "r.toml", "--out", "run", "--host", "a", "--listen", "10.0.0.1"],
            "--listen must be 0.0.0.0 or 127.0.0.1",
        ),
        (["join", "a:1", "--client", "0"], r"there is no ca\.crt: copy it"),
        (["join", "a", "--client", "0"], "must be HOST:PORT, .* got 'a'"),
        (["join", "a:1", "--client", "0", "--config", "capacty=1"], "a node has no setting 'capacty'; did you mean"),
    ],
)
def test_commands_say_what_is_missing(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, DeploymentError), match=reason):
        CliRunner().invoke(commands, words, catch_exceptions=False)


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
