"""The app folder for `flwr run`: one file that names the apps of this package and contains the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

import fedfactor
from fedfactor.runs.flower.device import number_of_nodes
from fedfactor.runs.flower.server import DEFAULTS
from fedfactor.runs.recipe import Recipe
from fedfactor.support.checks import near
from fedfactor.support.files import write_text

SERVER_APP = "fedfactor.runs.flower.server_app:app"
CLIENT_APP = "fedfactor.runs.flower.client_app:app"


def write_app(
    recipe: Recipe,
    folder: Path | str,
    run_dir: Path | str,
    *,
    config: Mapping[str, bool | int | float | str] | None = None,
) -> Path:
    """Write the folder and return its path; `run_dir` is on the machine where the ServerApp will run."""
    given = dict(config or {})
    for key, value in given.items():
        if key not in DEFAULTS:
            raise ValueError(
                f"a run on Flower has no setting {key!r}; {near(key, DEFAULTS)}the settings are {', '.join(DEFAULTS)}"
            )
        if isinstance(DEFAULTS[key], float) and type(value) is int:
            given[key] = float(value)
        elif type(value) is not type(DEFAULTS[key]):
            raise ValueError(f"{key} should be a {type(DEFAULTS[key]).__name__}, got {value!r}")
    if given.get("data") == "nodes":
        number_of_nodes(recipe)
    tables: dict[str, Any] = {
        "project": {
            "name": "fedfactor-app",
            "version": fedfactor.__version__,
            "description": f"fedfactor's recipe {recipe.tables['name']} on Flower.",
            "license": "Apache-2.0",
            "dependencies": [],  # this package must be installed on every machine
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedfactor",
                    "components": {"serverapp": SERVER_APP, "clientapp": CLIENT_APP},
                    "config": {
                        "recipe": recipe.to_toml(),
                        "run-dir": str(Path(run_dir).absolute()),
                        **DEFAULTS,
                        **given,
                    },
                }
            }
        },
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "pyproject.toml", tomli_w.dumps(tables, multiline_strings=True))
    return folder
