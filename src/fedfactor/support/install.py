"""How to install an extra of this package, in the way in which the package itself was installed."""

from __future__ import annotations

import importlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation."""
    try:
        found = metadata.distribution("fedfactor")
    except metadata.PackageNotFoundError:  # imported from a folder without being installed
        return f"pip install 'fedfactor[{extra}]'"
    installer = "uv pip" if (found.read_text("INSTALLER") or "").strip() == "uv" else "pip"
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if "dir_info" not in origin:  # from a wheel or an index: the extra is looked up in the installed package
        return f"{installer} install 'fedfactor[{extra}]'"
    folder = Path(url2pathname(urlsplit(origin["url"]).path))
    editable = "-e " if origin["dir_info"].get("editable") else ""
    return f"{installer} install {editable}'{'.' if folder == Path.cwd() else folder}[{extra}]'"


def optional(module: str, extra: str, purpose: str) -> Any:
    """Import an optional package. Raise ImportError that says what to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{purpose} needs {module.partition('.')[0]}: {install_command(extra)}") from error
