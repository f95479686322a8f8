"""What an error says about installing an extra matches how the package was installed."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from fedfactor.support.install import install_command

CHECKOUT = {"url": "file:///srv/my%20checkout", "dir_info": {}}
WHEEL = {"url": "file:///srv/fedfactor-1.0-py3-none-any.whl", "archive_info": {}}


@pytest.mark.parametrize(
    ("origin", "installer", "expected"),
    [
        (None, "pip", "pip install 'fedfactor[report]'"),  # an index
        (WHEEL, "pip", "pip install 'fedfactor[report]'"),
        (WHEEL, "uv\n", "uv pip install 'fedfactor[report]'"),
        (CHECKOUT, "pip", "pip install '/srv/my checkout[report]'"),
        ({**CHECKOUT, "dir_info": {"editable": True}}, "pip", "pip install -e '/srv/my checkout[report]'"),
        ({"url": "file://HERE", "dir_info": {"editable": True}}, "pip", "pip install -e '.[report]'"),
    ],
)
def test_the_command(
    origin: object, installer: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "fedfactor-1.0.dist-info"
    info.mkdir()
    (info / "INSTALLER").write_text(installer)
    if origin:
        (info / "direct_url.json").write_text(json.dumps(origin).replace("HERE", str(tmp_path)))
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(info))
    monkeypatch.chdir(tmp_path)
    assert install_command("report") == expected


def test_a_package_that_is_not_installed_has_a_command_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata.Distribution, "from_name", _nothing)
    assert install_command("onnx") == "pip install 'fedfactor[onnx]'"


def _nothing(name: str) -> None:
    raise metadata.PackageNotFoundError(name)
