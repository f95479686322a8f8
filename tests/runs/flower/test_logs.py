"""Errors of deployments name the log file that says more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedfactor.engines.flower.programs import DeploymentError
from fedfactor.runs.flower import hosts, local
from tests.helpers.command import fedfactor
from tests.helpers.recipes import recipe


class Fails:
    """A deployment whose SuperLink accepts no app."""

    def __init__(self, home: Path, **_: Any) -> None:
        self.home, self.logs = home, home / "logs"

    def __enter__(self) -> Fails:
        self.logs.mkdir(parents=True)
        (self.logs / "superlink.log").write_text("why")
        return self

    def __exit__(self, *_: object) -> None:
        (self.logs / "superlink.log").unlink()

    @property
    def control(self) -> Any:
        raise DeploymentError("it did not start")


def test_a_local_deployment_keeps_its_logs_and_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "run" / "flower-logs" / "superlink.log"
    monkeypatch.setattr(local, "Deployment", Fails)
    with pytest.raises(DeploymentError, match=rf"it did not start \(log: {log}; the nodes' logs are beside it\)"):
        local.run_local(recipe(), tmp_path / "run")
    assert log.read_text() == "why"


@pytest.mark.parametrize(
    ("error", "log"), [(DeploymentError("no"), "superlink.log"), (hosts.RunFailed("no"), "serverapp.log")]
)
def test_a_server_names_its_logs(error: Exception, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Place:
        folder = tmp_path / "site"
        certificates = keys = type("Paths", (), {"authority": "ca.crt", "folder": "keys"})

        def __init__(self, *_: object) -> None:
            pass

        def close(self) -> None:
            pass

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(hosts, "Site", Place)
    monkeypatch.setattr(hosts, "up", fail)
    (tmp_path / "tiny.toml").write_text(recipe().to_toml())
    done = fedfactor("flower", "up", tmp_path / "tiny.toml", "--out", tmp_path / "out", "--host", "localhost")
    assert done.exit_code == 2 and f"no (log: {tmp_path / 'site' / 'logs' / log})" in done.stderr
