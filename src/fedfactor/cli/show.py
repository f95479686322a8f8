"""Commands that show what there is: methods, the papers' tables, reports of runs, and data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedfactor.cli.common import (
    AsJson,
    DataDir,
    Quiet,
    RecipeFile,
    Settings,
    console,
    read_recipe,
    resolved_cells,
    tell,
)

data_app = typer.Typer(help="Show data sets and how they are split over clients.", no_args_is_help=True)


def tables(
    paper: Annotated[
        str | None, typer.Option(help="Only this paper: fedpara, flanc, fedhm, prism or feddecomp.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute the counts that the papers print, and show ours beside theirs."""
    from fedfactor.tables import compute, render

    rows = compute(paper)
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    else:
        console.print(render(rows))


def methods(as_json: AsJson = False) -> None:
    """List the methods, optimizers and codecs with their fields and papers."""
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


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders that contain them.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    target: Annotated[
        float | None,
        typer.Option(
            help="Show the cost of reaching this value of the deciding metric. Default: the recipes' target, or what "
            "all runs reach."
        ),
    ] = None,
    joules_per_byte: Annotated[
        float | None, typer.Option(help="Energy per byte on the link, for recipes that do not set it.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page. Default: the recipes' names.")] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also write each figure as a file into this folder, for a paper.")
    ] = None,
    figure_format: Annotated[str, typer.Option(help="Format of these files: pdf or svg.")] = "pdf",
    quiet: Quiet = False,
) -> None:
    """Write one HTML page about one or more runs. The page works offline."""
    from fedfactor.report import counted
    from fedfactor.report import report as write_report

    groups = write_report(
        runs,
        out,
        target=target,
        joules_per_byte=joules_per_byte,
        title=title,
        figures=figures,
        figure_format=figure_format,
    )
    if not quiet:
        count = sum(len(group.runs) for group in groups)
        tell(f"{out}: {counted(count, 'run')} of {counted(len(groups), 'setting')}")
        if figures:
            tell(f"figures: {figures}")


@data_app.command("show")
def data_show(
    recipe: RecipeFile,
    settings: Settings = None,
    data_dir: DataDir = None,
    only: Annotated[str, typer.Option(help="Show the first cell of a sweep whose name matches this pattern.")] = "*",
) -> None:
    """Show how many examples of each class each client has."""
    from fedfactor.data import draw, federated, load
    from fedfactor.runs.tasks import kind_of

    name, found = next(iter(resolved_cells(read_recipe(recipe), recipe, settings or [], only).items()))
    dataset = load(data_dir=data_dir, **found.tables["data"])
    try:  # reads the classes of datasets that do not list them
        dataset.labels(needed=kind_of(found, dataset.kind) == "classification")
    except ValueError as error:
        tell(f"{error}; so only the numbers of examples are shown")
    console.print(str(dataset), highlight=False)
    console.print(draw(federated(dataset, **found.tables["partition"]), dataset.class_names, title=name))
