"""The command line. Errors are one red sentence and exit code 2; `--debug` shows where they come from."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedfactor import __version__

app = typer.Typer(
    help="Federated learning of factorised models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()


def _version(wanted: bool) -> None:
    if wanted:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning of factorised models."""


@app.command()
def tables(
    paper: Annotated[str | None, typer.Option(help="Only this paper: fedpara, flanc, fedhm, prism, feddecomp.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array of rows instead of tables.")] = False,
) -> None:
    """Recompute every count the papers print and show ours beside theirs."""
    from fedfactor.tables import compute, render

    rows = compute(paper)
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    else:
        console.print(render(rows))


@app.command()
def methods(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array of entries instead of tables.")] = False,
) -> None:
    """List every method, optimizer and codec with its paper and its fields."""
    from fedfactor.registry import KINDS, entries

    found = {kind: entries(kind) for kind in KINDS}
    if as_json:
        print(json.dumps([entry.as_dict() for kind in KINDS for entry in found[kind].values()], indent=1))
        return
    for kind, known in found.items():
        table = Table("name", "what it is", "fields", "paper", title=kind, title_justify="left", show_lines=True)
        for entry in known.values():
            lines = [f"{field['name']} = {field['default']}: {field['help']}" for field in entry.fields()]
            table.add_row(entry.name, escape(entry.summary), escape("\n".join(lines)), entry.paper)
        console.print(table)


def main() -> None:
    """Run the command line."""
    try:
        app()  # exits by itself: 0 when done, 2 on wrong usage
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        Console(stderr=True, soft_wrap=True).print(f"[bold red]{type(error).__name__}:[/] [red]{escape(str(error))}[/]")
        sys.exit(2)
