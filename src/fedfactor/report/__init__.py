"""`fedfactor report`: one page that shows a run, or compares many, from their directories alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fedfactor.checks import check_number
from fedfactor.report.clients import clients, data
from fedfactor.report.costs import costs
from fedfactor.report.curves import accuracy, capacities, main_measure, overview
from fedfactor.report.facts import audits, failures, protocol, recipes
from fedfactor.report.groups import Group, group
from fedfactor.report.insides import bases, others, picks, ranks
from fedfactor.report.page import page
from fedfactor.report.parts import Section
from fedfactor.report.read import RunData, find, read

__all__ = ["Group", "RunData", "counted", "group", "read_groups", "report", "sections"]


def report(
    paths: Iterable[Path | str],
    out: Path | str,
    *,
    target: float | None = None,
    joules_per_byte: float | None = None,
    title: str | None = None,
) -> list[Group]:
    """Write the report of the runs at and below some paths; runs that differ by their seed only are averaged.

    `target` is the accuracy whose cost is shown: by default the recipes', or the highest that every run reaches.
    `joules_per_byte` is the link's energy where recipes do not say it.
    """
    if Path(out).suffix != ".html":
        raise ValueError(f"the report is an HTML file: give a name that ends in .html, got {out}")
    if target is not None:
        check_number("target", target, 0, 1)
    if joules_per_byte is not None:
        check_number("joules_per_byte", joules_per_byte, 0)
    groups, remarks = read_groups(paths)
    runs = [run for one in groups for run in one.runs]
    named = ", ".join(dict.fromkeys(str(run.tables.get("name", run.name)) for run in runs))
    lead = f"{counted(len(runs), 'run')}, {counted(len(groups), 'setting')}; made from run directories alone."
    found = sections(groups, remarks, target, joules_per_byte)
    text = page(title or named, lead, groups, found)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(text, encoding="utf-8")
    return groups


def read_groups(paths: Iterable[Path | str]) -> tuple[list[Group], list[str]]:
    """Return the groups of all runs at and below some paths, and remarks on runs that were left out."""
    return group(read(find(paths)))


def sections(
    groups: list[Group], remarks: list[str], target: float | None = None, joules_per_byte: float | None = None
) -> list[Section]:
    """Return the parts of the page; those that no run has anything for are left out."""
    measure = main_measure(groups)
    found = [
        overview(groups, measure, remarks),
        accuracy(groups, measure),
        costs(groups, measure, target, joules_per_byte),
        capacities(groups),
        clients(groups),
        data(groups),
        ranks(groups),
        bases(groups),
        picks(groups),
        others(groups),
        failures(groups),
        audits(groups),
        protocol(groups),
        recipes(groups),
    ]
    return [section for section in found if section is not None]


def counted(number: int, what: str) -> str:
    """Write how many of something there are."""
    return f"{number} {what}{'' if number == 1 else 's'}"
