"""A small recipe on digits."""

from __future__ import annotations

from typing import Any

from fedfactor.runs.recipe import Recipe, override, resolve

TABLES: dict[str, Any] = {
    "name": "tiny",
    "seed": 5,
    "data": {"name": "digits", "test_share": 0.8},
    "partition": {"kind": "iid", "clients": 6},
    "model": {"name": "tests.helpers.tiny:Tiny"},
    "train": {"rounds": 3, "cohort": 3, "batch_size": 20, "lr": 0.05},
}


def recipe(*assignments: str) -> Recipe:
    """Three rounds of three out of six clients, with these settings."""
    return resolve(override(TABLES, list(assignments)), "tiny.toml")


BASE: dict[str, Any] = {
    "name": "base",
    "data": {"name": "digits"},
    "partition": {"kind": "dirichlet", "clients": 20},
    "model": {"name": "digits_cnn"},
    "method": {"name": "fedpara"},
}
"""Only what a recipe needs, and a method with settings; not to be run."""
