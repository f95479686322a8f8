"""What other packages add through entry points is found, listed and run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedfactor.methods import FedAvg
from fedfactor.registry import register

MODULE = '''
from dataclasses import dataclass, field
from fedfactor.methods import FedAvg
from fedfactor.registry import described, register

@register("methods", "mine", paper="none")
@dataclass(frozen=True)
class Mine(FedAvg):
    """Mine."""

    level: int = field(default=3, metadata=described("how much"))
'''


def test_an_installed_package_adds_a_method(tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(MODULE)
    info = tmp_path / "my_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedfactor.methods]\nmine = my_methods\n")
    done = subprocess.run(
        [sys.executable, "-c", "from fedfactor.cli import main; main()", "methods", "--json"],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": str(tmp_path), "PATH": ""},
    )  # fmt: skip
    mine = next(row for row in json.loads(done.stdout) if row["name"] == "mine")
    assert mine["fields"] == [{"name": "level", "type": "int", "default": 3, "help": "how much"}]


def test_a_name_is_taken_once_and_classes_are_frozen_dataclasses() -> None:
    with pytest.raises(ValueError, match="'fedavg' is registered already"):

        @register("methods", "fedavg")
        @dataclass(frozen=True)
        class Other(FedAvg):
            pass

    with pytest.raises(TypeError, match="must be a frozen dataclass"):

        @register("methods", "loose")
        class Loose:
            pass
