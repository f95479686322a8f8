"""What we rely on in flwr, one thing a test: after an upgrade these fail first, and say where to look."""

from __future__ import annotations

import io
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import validate_config
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.object_ref import load_app
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity

import fedfactor
from fedfactor.engines.flower.adapter import ERRORS, REFUSED, pack
from fedfactor.runs.flower.app import CLIENT_APP, SERVER_APP, write_app
from tests.helpers.grid import FIRST_ID, LocalGrid, put_together, recipe, taken_apart, travelled


def test_messages_need_an_identity_which_the_local_grid_sets() -> None:
    TaskIdentity._task_id = TaskIdentity._run_id = TaskIdentity._node_id = None
    with pytest.raises(RuntimeError, match="TaskIdentity"):
        Message(RecordDict(), FIRST_ID, "train")
    LocalGrid([], {})
    assert Message(RecordDict(), FIRST_ID, "train").metadata.dst_node_id == FIRST_ID


def test_an_answer_belongs_to_the_message_it_replies_to() -> None:
    LocalGrid([], {})
    asked = travelled(Message(pack(None, {}), FIRST_ID, "train"))
    reply = travelled(Message(pack(None, {}), reply_to=asked))
    assert reply.metadata.reply_to_message_id == asked.metadata.message_id != ""
    assert reply.metadata.src_node_id == FIRST_ID


def test_the_superlink_tells_the_nodes_keys() -> None:
    assert {"node_id", "public_key"} <= {field.name for field in NodeInfo.DESCRIPTOR.fields}


def test_the_error_codes_mean_what_we_say() -> None:
    names = {number: name for name, number in vars(ErrorCode).items() if isinstance(number, int)}
    assert REFUSED in ERRORS and REFUSED not in names, "the code of our SuperLink is none of Flower's"
    assert {number: names[number] for number in ERRORS if number != REFUSED} == {
        1: "LOAD_CLIENT_APP_EXCEPTION", 2: "CLIENT_APP_RAISED_EXCEPTION", 3: "MESSAGE_UNAVAILABLE",
        4: "REPLY_MESSAGE_UNAVAILABLE", 5: "NODE_UNAVAILABLE", 7: "INVALID_FAB", 8: "CLIENT_APP_CRASHED",
    }  # fmt: skip


def test_what_is_wrong_with_the_run_itself_is_no_ordinary_exception() -> None:
    assert not issubclass(RunNotRunningException, Exception), "else it would be taken for a node's fault"


def test_an_answer_in_pieces_is_put_together_or_raised_within_a_pull() -> None:
    LocalGrid([], {})
    sent = Message(pack(b"x", {}), FIRST_ID, "train")
    with pytest.raises(ValueError):
        put_together(sent.object_id, dict.fromkeys(taken_apart(sent), b"?"))


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # flwr's own use of pathspec
def test_a_written_app_is_one_that_flwr_accepts_and_bundles(tmp_path: Path) -> None:
    chosen = recipe("fedpara")
    folder = write_app(chosen, tmp_path / "app", tmp_path / "run", config={"deadline": 60})
    tables = tomllib.loads((folder / "pyproject.toml").read_text())
    valid, errors, warnings = validate_config(tables, check_module=True, project_dir=folder)
    assert valid and not errors and not warnings
    config = tables["tool"]["flwr"]["app"]["config"]
    assert config["deadline"] == 60.0 and config["run-dir"] == str(tmp_path / "run")
    assert tomllib.loads(config["recipe"]) == tomllib.loads(chosen.to_toml())
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(folder))) as bundle:
        assert "pyproject.toml" in bundle.namelist()
        assert tomllib.loads(bundle.read("pyproject.toml").decode())["tool"]["flwr"]["app"]["config"] == config


def test_flwr_loads_the_apps_of_the_installed_library(tmp_path: Path) -> None:
    before = list(sys.path)
    try:
        for name, kind in ((SERVER_APP, "ServerApp"), (CLIENT_APP, "ClientApp")):
            assert type(load_app(name, RuntimeError, tmp_path)).__name__ == kind
    finally:
        sys.path[:] = before


SILENT = """
import socket
calls = []
def refuse(self, address):
    calls.append(address)
    raise OSError("no network")
socket.socket.connect = refuse
socket.getaddrinfo = lambda *a, **k: refuse(None, a)
from fedfactor.runs.flower import client_app, server_app
from flwr.supercore import telemetry, update_check
print(telemetry.event(telemetry.EventType.PING).result(10), flush=True)
update_check.warn_if_flwr_update_available("flwr")
import threading
print(len(calls), [t.name for t in threading.enumerate() if not t.daemon])
"""


def test_nothing_is_reported_and_no_update_is_looked_for(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SILENT], capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert done.stdout.splitlines() == ["disabled", "0 ['MainThread']"], done.stderr


def test_flwr_is_the_version_that_is_pinned() -> None:
    import importlib.metadata

    major, minor, *_ = importlib.metadata.version("flwr").split(".")
    assert (major, minor) == ("1", "41")
    text = (Path(fedfactor.__file__).parents[2] / "pyproject.toml").read_text()
    assert text.count('"flwr>=1.41,<1.42"') == 1
