"""Nothing is reported, looked up or installed, and nobody else's machine is called."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from fedfactor.runs.flower.local import Deployment, run_local
from tests.helpers.deployment import HASHES, WATCHED, inline, own_processes, recipe
from tests.helpers.watched.sitecustomize import is_here

pytestmark = pytest.mark.deploy


def told(log: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_flower_local_calls_nobody_outside_installs_nothing_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, before = tmp_path / "watched", own_processes()
    monkeypatch.setenv("WATCHED", str(log))
    monkeypatch.setattr(sys, "path", [str(WATCHED), *sys.path])
    one, heard = recipe("feddecomp", rounds=2, clients=2), list[str]()
    found = run_local(one, tmp_path / "run", on_event=lambda event: heard.append(event["event"]))
    assert {key: found[key] for key in HASHES} == {key: inline(one)[key] for key in HASHES}
    assert heard == ["start", "committed", "round", "committed", "round", "committed"]
    assert own_processes() <= before
    assert not (tmp_path / "run" / "flower").exists()
    seen = told(log)
    by = " ".join(line["by"] for line in seen)
    for program in ("superlink.py", "flower-superexec", "flwr-serverapp", "supernode.py", "flwr-clientapp"):
        assert program in by, f"{program} was not watched"
    calls = {line["to"] for line in seen if line["event"] != "subprocess.Popen"}
    assert calls
    assert all(is_here(call) for call in calls), calls
    started = {Path(line["to"].split()[0]).name for line in seen if line["event"] == "subprocess.Popen"}
    flowers = {"flower-superexec", "flwr-serverapp", "flwr-clientapp"}
    python = Path(sys.executable).name  # which runs our superlink.py, supernode.py and worker
    assert started == {*flowers, python, "uname", "file"}, started  # the last two by Python's own platform module


def test_the_watch_sees_calls(tmp_path: Path) -> None:
    log = tmp_path / "watched"
    code = "import socket; s = socket.socket(); s.settimeout(0.1); s.connect_ex(('192.0.2.1', 9))"
    environment = {"PYTHONPATH": str(WATCHED), "WATCHED": str(log)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert [line["to"] for line in told(log)] == ["192.0.2.1"]
    assert not is_here("192.0.2.1")
    assert not is_here("telemetry.flower.ai")


def test_other_machines_cannot_start_runs_or_register_keys(deployment: Deployment) -> None:
    assert deployment.certificates is not None
    # On Linux all of 127.0.0.0/8 is this machine: a caller from 127.0.0.2 stands for another one.
    trust = ssl.create_default_context(cafile=str(deployment.certificates.authority))
    transport = httpx.HTTPTransport(verify=trust, local_address="127.0.0.2")
    with httpx.Client(transport=transport, base_url=f"https://{deployment.address}") as other:
        for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs"):
            answer = other.post(path)
            assert answer.status_code == 403, path
            assert "only the machine of the SuperLink" in answer.text
        assert other.get("/health").status_code == 200
        assert other.post("/v1/fleet/pull-messages").status_code != 403
