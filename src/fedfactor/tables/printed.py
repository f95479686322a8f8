"""Figures as the papers print them (`printed.toml`), and the cells that are wrong in print, with the reason."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

PRINTED: dict[str, Any] = tomllib.loads(files("fedfactor.tables").joinpath("printed.toml").read_text(encoding="utf-8"))
MISPRINTS: dict[tuple[str, str, str, str], str] = {
    (found["paper"], table, row, quantity): found["reason"]
    for found in PRINTED["misprints"]
    for table, row, quantity in found["cells"]
}
"""Reason by paper, table, row and quantity. These cells get the verdict `misprint`."""
