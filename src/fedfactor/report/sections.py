"""The sections of the report, and the whole page."""

from __future__ import annotations

from plotly.offline import get_plotlyjs

from fedfactor.report.clients import clients, data
from fedfactor.report.costs import costs
from fedfactor.report.curves import accuracy, capacities, main_measure, overview
from fedfactor.report.elements import Section
from fedfactor.report.facts import audits, failures, protocol, recipes
from fedfactor.report.groups import Group
from fedfactor.report.insides import bases, others, picks, ranks
from fedfactor.report.page import page
from fedfactor.report.plots import DASHES, colour, dash


def sections(
    groups: list[Group], remarks: list[str], target: float | None = None, joules_per_byte: float | None = None
) -> list[Section]:
    """Return the sections for which some run has data."""
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


def report_page(title: str, lead: str, groups: list[Group], found: list[Section]) -> str:
    """Return the page with its legend and with plotly's JavaScript."""
    return page(title, lead, found, groups=groups, colour=colour, dash=dash, dashes=DASHES, plotly=get_plotlyjs())
