"""What the commands share: output, options that several of them have, and reading recipes."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from fedfactor.runs.recipe import Recipe

Number = TypeVar("Number", int, float)

console = Console(emoji=False)
if not console.is_terminal and "COLUMNS" not in os.environ:
    console = Console(width=160, emoji=False)  # a file or another program has no narrow screen

RecipeFile = Annotated[Path, typer.Argument(help="A recipe file (TOML), or the name of a packaged recipe.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key of the recipe: --set train.rounds=5. Repeatable.")
]
DataDir = Annotated[Path | None, typer.Option(help="Folder of data sets. Default: FEDFACTOR_DATA, or a cache folder.")]
Small = Annotated[bool, typer.Option("--small", help="Apply the recipe's `small` overlay, for a quick try.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors only.")]
Latex = Annotated[bool, typer.Option("--latex", help="Print the table as LaTeX.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def tell(sentence: str) -> None:
    """Print one line as it is, however long: other programs may read it."""
    console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def complain(sentence: str, kind: str = "") -> None:
    """Print a red sentence to standard error."""
    head = f"[bold red]{kind}:[/] " if kind else ""
    Console(stderr=True, soft_wrap=True, emoji=False).print(f"{head}[red]{escape(sentence)}[/]")


def write_once(path: Path, text: str) -> None:
    """Write a new file. Raises ValueError if the file exists, or its folder does not."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{path} exists already; choose another name, or remove the file") from None
    except FileNotFoundError:
        raise ValueError(f"the folder {path.parent} does not exist; create it first") from None


def listed(text: str) -> list[str]:
    """Split a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(option: str, text: str, example: str, kind: Callable[[str], Number]) -> list[Number]:
    """Read the comma-separated numbers that an option was given."""
    try:
        return [kind(word) for word in listed(text)]
    except ValueError:
        raise ValueError(f"{option} takes numbers separated by commas, such as {example}, got {text!r}") from None


def read_recipe(path: Path, small: bool = False) -> dict[str, Any]:
    """Read a recipe file or a packaged recipe; a recipe without a name gets the name of its file."""
    from fedfactor.runs import recipe as recipes
    from fedfactor.runs.catalog import find

    tables = recipes.read(find(path))
    tables.setdefault("name", path.stem)
    return recipes.small(tables) if small else tables


def resolved_cells(tables: dict[str, Any], path: Path, settings: list[str], only: str = "*") -> dict[str, Recipe]:
    """Return the cells of a recipe whose name matches the pattern, resolved; without a sweep there is one cell."""
    from fedfactor.runs import recipe as recipes

    found = recipes.overridden_cells(tables, settings)
    chosen = {name: cell for name, cell in found.items() if fnmatch.fnmatchcase(name, only)}
    if not chosen:
        raise ValueError(f"no cell of {path} matches {only!r}; its cells are {', '.join(found)}")
    return {name: recipes.resolve(cell, f"{path} ({name})") for name, cell in chosen.items()}
