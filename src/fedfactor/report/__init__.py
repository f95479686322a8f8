"""`fedfactor report`: one page that shows a run or compares several. It needs the run directories only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fedfactor.report.groups import Group, group_runs
from fedfactor.report.read import RunData, read_runs
from fedfactor.report.values import counted
from fedfactor.runs.directory import find_runs
from fedfactor.support.checks import check_choice, check_number
from fedfactor.support.files import write_text
from fedfactor.support.install import install_command

__all__ = ["Group", "RunData", "counted", "read_groups", "report"]

FIGURE_FORMATS = ("pdf", "svg")


def report(
    paths: Iterable[Path | str],
    out: Path | str,
    *,
    target: float | None = None,
    joules_per_byte: float | None = None,
    title: str | None = None,
    figures: Path | str | None = None,
    figure_format: str = "pdf",
) -> list[Group]:
    """Write the report on all runs at and below some paths. Runs that differ in their seeds only are averaged.

    Args:
        paths: Run directories, or folders that contain some.
        out: The HTML file to write.
        target: The value of the deciding metric whose cost is shown. Default: the recipes' target, or the best value
            that every run reaches.
        joules_per_byte: The energy of the link, for recipes that do not give it.
        title: The heading of the page. Default: the names of the recipes.
        figures: Also write each figure as a file into this folder.
        figure_format: The format of these files: `pdf` or `svg`.

    Raises:
        ImportError: If plotly or Jinja2, or for figures matplotlib, is missing.
        RunError: If a path contains no run directory, or a run directory cannot be read.
    """
    try:
        from fedfactor.report.sections import report_page, sections
    except ImportError as error:
        raise ImportError(f"the report needs plotly and Jinja2 ({error}): {install_command('report')}") from error
    check_choice("figure_format", figure_format, FIGURE_FORMATS)
    if figures is not None:
        try:
            from fedfactor.report.figures import write_figures
        except ImportError as error:
            raise ImportError(f"figures need matplotlib ({error}): {install_command('figures')}") from error
    if Path(out).suffix != ".html":
        raise ValueError(f"the report is an HTML file: choose a name that ends in .html, got {out}")
    if joules_per_byte is not None:
        check_number("joules_per_byte", joules_per_byte, 0)
    groups, remarks = read_groups(paths)
    groups[0].decider.check_target(target)
    runs = [run for group in groups for run in group.runs]
    names = ", ".join(dict.fromkeys(str(run.tables.get("name", run.name)) for run in runs))
    lead = f"{counted(len(runs), 'run')}, {counted(len(groups), 'setting')}. Made from the run directories alone."
    found = sections(groups, remarks, target, joules_per_byte)
    if figures is not None:
        write_figures(found, Path(figures), figure_format)
    text = report_page(title or names, lead, groups, found)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(out), text)
    return groups


def read_groups(paths: Iterable[Path | str]) -> tuple[list[Group], list[str]]:
    """Return the groups of all runs at and below some paths, and a remark on each run that was left out."""
    return group_runs(read_runs(find_runs(paths)))
