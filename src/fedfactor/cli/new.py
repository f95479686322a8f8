"""`fedfactor new`: write a method that passes the conformance suite, or a recipe that runs, as a file to start from."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from fedfactor.cli.common import tell, write_once

KINDS = ("method", "recipe")

TEMPLATES = Path(__file__).parent / "templates"


def new(
    kind: Annotated[str, typer.Argument(help="method or recipe.")],
    name: Annotated[str, typer.Argument(help="Its name, which is also the name of the file.")],
    folder: Annotated[Path, typer.Option("--out", "-o", help="Folder to write into.")] = Path(),
) -> None:
    """Write a method or a recipe to start from. It runs as it is."""
    path = write_new(kind, name, folder)
    tell(f"wrote {path}; next: {'python' if kind == 'method' else 'fedfactor run'} {path}")


def write_new(kind: str, name: str, folder: Path = Path()) -> Path:
    """Write a method or a recipe to start from into a folder and return its path. Never overwrites a file."""
    if kind not in KINDS:
        raise ValueError(f"`fedfactor new` writes a {' or a '.join(KINDS)}, got {kind!r}")
    path = folder / f"{name}{'.py' if kind == 'method' else '.toml'}"
    write_once(path, method_text(name) if kind == "method" else recipe_text(name))
    return path


def method_text(name: str) -> str:
    """Return the source of a method to start from."""
    from fedfactor.registry import entries

    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError(
            f"a method's name consists of lower-case letters, digits and _, such as my_method, got {name!r}"
        )
    if name in entries("methods"):
        raise ValueError(f"a method {name!r} exists already; choose another name")
    return _filled("method", name=name, cls="".join(word.capitalize() for word in name.split("_")))


def recipe_text(name: str) -> str:
    """Return a recipe to start from."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or name.endswith(".toml"):
        raise ValueError(
            f"a recipe's name is also the name of a directory, such as my-recipe, and has no suffix .toml, got {name!r}"
        )
    return _filled("recipe", name=name)


def _filled(kind: str, **values: str) -> str:
    return Template((TEMPLATES / f"{kind}.txt").read_text(encoding="utf-8")).substitute(values)
