"""What is used of Flower besides its public interface, one test each; and what of ours stands on it."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import io
import json
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.config import parse_config_args
from flwr.common.constant import Status, SubStatus
from flwr.proto import control_pb2
from flwr.proto.federation_config_pb2 import SimulationConfig
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.run_pb2 import Run, RunStatus
from flwr.supercore.constant import NodeStatus
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError

from fedfactor.engines.flower.adapter import QUIET
from fedfactor.engines.flower.certificates import Certificates, node_key
from fedfactor.engines.flower.control import Control, NoAnswer, bundle, key_bytes, user_config_to_proto
from fedfactor.engines.flower.programs import (
    DeploymentError,
    free_port,
    node_command,
    superlink_command,
)
from fedfactor.runs.flower.app import write_app
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
    node = node_command("127.0.0.1:1", files.authority, files.key, 2, {"client": 0}, tmp_path)
    execute = ["--runtime-api-address", "--root-certificates", "--superexec-auth-secret-file"]
    for words, parser in [
        (link, SUPERLINK._parse_args_run_superlink()),
        (node, SUPERNODE._parse_args_run_supernode()),
        (execute, SUPEREXEC._parse_args()),
    ]:
        assert {word for word in words if word.startswith("--")} <= options(parser)


def test_a_nodes_configuration_reaches_it_as_it_was_given(tmp_path: Path) -> None:
    given = {"client": 0, "capacity": 0.5, "data-options": json.dumps({"root": '/srv/a "b" c', "sizes": [1, 2]})}
    *_, written = node_command("127.0.0.1:1", tmp_path / "ca.crt", tmp_path / "key", 2, given, tmp_path)
    assert parse_config_args([written]) == given


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


def test_keys_of_other_kinds_are_refused(tmp_path: Path) -> None:
    public = ed25519.Ed25519PrivateKey.generate().public_key()
    (tmp_path / "a.pub").write_bytes(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    with pytest.raises(DeploymentError, match="elliptic curves only"):
        key_bytes(tmp_path / "a.pub")


def test_a_server_that_is_not_there_is_named() -> None:
    port = free_port()
    with Control(f"127.0.0.1:{port}", None) as control:
        assert not control.answers()
        with pytest.raises(DeploymentError, match=f"no answer from a SuperLink at 127.0.0.1:{port}"):
            control.nodes()
