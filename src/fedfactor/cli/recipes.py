"""`fedfactor recipes ...`: the recipes that come with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fedfactor.cli.common import console, tell, write_once

app = typer.Typer(help="List the recipes that come with the package, copy one to edit, or print their JSON Schema.")


@app.callback(invoke_without_command=True)
def listed(context: typer.Context) -> None:
    """List the recipes that come with the package, copy one to edit, or print their JSON Schema."""
    from fedfactor.runs import catalog

    if context.invoked_subcommand is not None:
        return
    names = catalog.names()
    width = max(map(len, names))
    for name in names:
        line = Text(f"{name:<{width}}  {catalog.description(name)}")
        if console.is_terminal:  # one line per recipe; a file or another program gets the full description
            line.truncate(console.width, overflow="ellipsis")
        console.print(line, soft_wrap=True)


@app.command()
def copy(
    name: Annotated[str, typer.Argument(help="Name of a packaged recipe, such as demo or fedpara/table12.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write. Default: the name with - instead of /, and .toml."),
    ] = None,
) -> None:
    """Copy a packaged recipe to a file, to edit and run."""
    from fedfactor.runs import catalog

    source = catalog.packaged(name)
    path = out or Path(f"{name.replace('/', '-')}.toml")
    write_once(path, source.read_text(encoding="utf-8"))
    tell(f"wrote {path}; next: fedfactor run {path}")


@app.command()
def schema() -> None:
    """Print a JSON Schema of recipes, with which editors complete and check them."""
    from fedfactor.runs.recipe import schema as recipe_schema

    print(json.dumps(recipe_schema(), indent=1))
