"""`fedfactor flower ...`: the same recipes on Flower."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedfactor.cli.flower_hosts import join, status, up

app = typer.Typer(help="Run recipes on Flower: across machines, or on its simulation engine.", no_args_is_help=True)
app.command()(up)
app.command()(join)
app.command()(status)
console = Console()


@app.command("app")
def write(
    recipe: Annotated[Path, typer.Argument(help="A recipe file (TOML), or the name of a packaged recipe.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; `flwr run DIR` takes it as it is.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the recipe: --set train.rounds=5. Repeatable.")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", help="A setting of the run on Flower: --config deadline=60. Repeatable."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Run directory on the host of the ServerApp; default runs/NAME from here.")
    ] = None,
    only: Annotated[str, typer.Option(help="Of a sweep, the one cell whose name matches this pattern.")] = "*",
) -> None:
    """Write a folder that `flwr run` accepts; fedfactor must be installed on every host."""
    from fedfactor.runs import recipe as recipes
    from fedfactor.runs.catalog import find
    from fedfactor.runs.flower.app import write_app

    tables = recipes.read(find(recipe))
    tables.setdefault("name", recipe.stem)
    found = recipes.overridden_cells(tables, settings or [])
    cells = [name for name in found if fnmatch.fnmatchcase(name, only)]
    if len(cells) != 1:
        raise ValueError(f"an app holds one recipe, {recipe} has {len(cells)} that match {only!r}: {', '.join(found)}")
    resolved = recipes.resolve(found[cells[0]], f"{recipe} ({cells[0]})")
    given = recipes.override({}, config or [])
    where = run_dir or Path("runs") / resolved.tables["name"] / (cells[0] if "sweep" in tables else "")
    write_app(resolved, folder, where, config=given)
    console.print(
        f"flwr run {folder}: writes {where.absolute()} on the host of the ServerApp", highlight=False, soft_wrap=True
    )
