"""Apps for `flwr run`: settings that are not legal are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedfactor.runs.flower.app import write_app
from tests.helpers.grid import recipe


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no setting 'dedline'; did you mean 'deadline'"):
        write_app(recipe(), tmp_path, tmp_path, config={"dedline": 5})
    natural = recipe(partition={"kind": "natural", "clients": 0})
    with pytest.raises(ValueError, match=r"set partition\.clients in the recipe to the number of nodes"):
        write_app(natural, tmp_path, tmp_path, config={"data": "nodes"})
    with pytest.raises(ValueError, match="deadline should be a float, got 'soon'"):
        write_app(recipe(), tmp_path, tmp_path, config={"deadline": "soon"})
