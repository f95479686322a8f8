"""Render sections as one HTML file that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import fedfactor
from fedfactor.report.elements import Section

TEMPLATES = Environment(
    loader=PackageLoader("fedfactor.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page(title: str, lead: str, sections: Sequence[Section], **report: Any) -> str:
    """Return the page. `lead` is the paragraph below the title.

    A page with figures also needs the values from which the template makes their legend, and plotly's JavaScript.
    """
    values = {"groups": (), "plotly": "", **report, "version": fedfactor.__version__}
    return TEMPLATES.get_template("page.html.j2").render(title=title, lead=lead, sections=sections, **values)
