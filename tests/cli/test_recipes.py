"""`fedfactor recipes`: the list, and copies to edit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fedfactor.runs import catalog
from tests.helpers.command import fedfactor


def test_recipes_lists_one_line_each() -> None:
    lines = fedfactor("recipes").stdout.splitlines()
    assert [line.split()[0] for line in lines] == catalog.names()
    assert all(catalog.description(line.split()[0]) in line for line in lines)


def test_the_list_starts_without_torch() -> None:
    code = "import sys; from fedfactor.cli import app; app(['recipes'], standalone_mode=False); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_copy_is_written_once(tmp_path: Path) -> None:
    assert (
        "wrote fedpara-table12.toml; next: fedfactor run fedpara-table12.toml"
        in fedfactor("recipes", "copy", "fedpara/table12", cwd=tmp_path).stdout
    )
    assert (tmp_path / "fedpara-table12.toml").read_text() == catalog.packaged("fedpara/table12").read_text()
    assert fedfactor("recipes", "copy", "demo", "-o", "mine.toml", cwd=tmp_path).exit_code == 0
    assert (tmp_path / "mine.toml").read_text() == catalog.packaged("demo").read_text()
    (tmp_path / "mine.toml").write_text("name = 'edited'")
    assert "mine.toml exists already" in fedfactor("recipes", "copy", "demo", "-o", "mine.toml", cwd=tmp_path).stderr
    assert (tmp_path / "mine.toml").read_text() == "name = 'edited'"
    assert (
        "the folder nowhere does not exist"
        in fedfactor("recipes", "copy", "demo", "-o", "nowhere/a.toml", cwd=tmp_path).stderr
    )
    assert "no packaged recipe is called 'demos'" in fedfactor("recipes", "copy", "demos", cwd=tmp_path).stderr
