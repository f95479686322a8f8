"""One HTML file that needs no other: sections, their style, and the script that draws."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

import fedfactor
from fedfactor.report.groups import Group
from fedfactor.report.parts import Section, colour, dash

STROKES = {"solid": "", "dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3", "longdash": "10 4"}

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="fedfactor {version}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the figures</a>
<header>
<h1>{title}</h1>
<p class="lead">{lead}</p>
<nav aria-label="Contents"><ul>{menu}</ul></nav>
</header>
{choice}
<main id="main">{sections}</main>
<noscript><p>Figures are drawn by a script in this page; the table below each has its numbers.</p></noscript>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def page(title: str, lead: str, groups: Sequence[Group], sections: Sequence[Section]) -> str:
    """Return the page."""
    here = files("fedfactor.report")
    menu = "".join(f'<li><a href="#{section.name}">{escape(section.title)}</a></li>' for section in sections)
    return PAGE.format(
        version=escape(fedfactor.__version__),
        title=escape(title),
        lead=escape(lead),
        style=(here / "page.css").read_text(encoding="utf-8"),
        menu=menu,
        choice=_choice(groups),
        sections="".join(section.html() for section in sections),
        plotly=plotly_script(),
        script=(here / "page.js").read_text(encoding="utf-8"),
    )


def plotly_script() -> str:
    """Return plotly's own script, which its Python package brings along."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError("the report needs the package plotly: pip install 'fedfactor[report]'") from None
    script: str = get_plotlyjs()
    if "</script" in script.lower():
        raise ValueError("this version of plotly cannot stand inside a page; install another one")
    # The wrapper for other module systems is a function around everything, which browsers read twice: a page that has
    # plotly alone opens a quarter sooner without it.
    head, begin, rest = script.partition('"use strict";var Plotly=')
    body, end, _ = rest.rpartition("window.Plotly = Plotly;")
    return head[: head.find("*/") + 2] + begin + body if begin and end else script


def _choice(groups: Sequence[Group]) -> str:
    """Return the legend of all figures: a box a group, which shows and hides it everywhere."""
    boxes = "".join(
        f'<label><input type="checkbox" checked value="{group.number}">'
        f'<svg width="28" height="6" aria-hidden="true"><line x1="0" y1="3" x2="28" y2="3" stroke-width="3" '
        f'stroke="{colour(group.number)}" stroke-dasharray="{STROKES[dash(group.number)]}"/></svg>'
        f"{escape(group.label)}</label>"
        for group in groups
    )
    if any(len(group.runs) > 1 for group in groups):
        boxes += '<label><input type="checkbox" checked value="bands">95 % bands</label>'
    return f"<fieldset><legend>Shown:&nbsp;</legend>{boxes}</fieldset>"
