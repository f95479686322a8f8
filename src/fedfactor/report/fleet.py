"""Time and energy on a fleet of devices, as the virtual clock counted them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go

from fedfactor.report.curves import Spent, against
from fedfactor.report.elements import Element, Figure, Fold, Section, Table, Text
from fedfactor.report.groups import Group
from fedfactor.report.plots import COLOURS, figure, plain, rounded
from fedfactor.report.values import UNITS, four_digits, span, thin, unit_for
from fedfactor.server.clock import PHASES

TIME = Spent("simulated time", "simulated_seconds", "on the fleet", "Time: the virtual clock of the fleet.")
ENERGY = Spent(
    "energy", "simulated_joules", "used", "Energy: computation and transfers of all clients that were asked."
)
PHASE_COLOURS = dict(zip(PHASES, ("#808a9d", COLOURS[0], COLOURS[1], COLOURS[2]), strict=True))
MOST_CLIENTS = 40
"""Number of clients that a timeline shows."""
THICKEST, ROOM = 16, 360
"""Pixels: the largest width of a client's bar, and the height that all bars share."""


def fleet(groups: Sequence[Group], measure: str | None) -> Section | None:
    """Return the deciding metric against simulated time and energy, times per device, and the timeline of a round."""
    timed = [group for group in groups if any(run.timeline for run in group.runs)]
    if not timed:
        return None
    elements: list[Element] = []
    for spent in (TIME, ENERGY):
        if measure and any(run.totals.get(spent.series) for group in timed for run in group.runs):
            elements.append(against(timed, measure, spent))
    elements.append(_by_device(timed))
    first, *others = (_timeline(group) for group in timed)
    folds = [Fold(one.title, [one]) for one in others]
    words = "The timelines show the last round of the first run of each group."
    return Section("fleet", "Time on the fleet", [*elements, Text(words), first, *folds])


def _by_device(groups: Sequence[Group]) -> Table:
    rows = []
    for group in groups:
        names = dict.fromkeys(name for run in group.runs for name in run.devices)
        for name in names:
            counts = sum((run.devices[name] for run in group.runs), start=Counter[str]())
            asked = counts["asked"]
            shares = (
                f"{100 * counts[outcome] / asked:.1f} %" for outcome in ("used", "pending", "late", "failed", "surplus")
            )
            rows.append([group.label, name, str(round(asked)), *shares, *(span(counts[one] / asked) for one in PHASES)])
    head = ["run", "device", "clients asked", "used", "used later", "late", "failed", "not needed", *PHASES]
    return Table(head, rows, "Clients by device, summed over rounds and seeds, and their mean time per round")


def _timeline(group: Group) -> Figure:
    """Draw the last round of a group's first timed run: one bar per client, with what the client does one by one."""
    run = next(run for run in group.runs if run.timeline)
    clock = run.timeline
    order = sorted(range(len(clock["clients"])), key=lambda place: -_seconds(clock, place))
    shown = thin(order, MOST_CLIENTS)
    scale, unit, _ = unit_for([_seconds(clock, place) for place in shown], UNITS["time"])
    starts = dict.fromkeys(shown, 0.0)
    drawn: list[Any] = []
    for phase in PHASES:
        xs: list[float | None] = []
        ys: list[float | None] = []
        for height, place in enumerate(shown):
            seconds = clock[phase][place]
            if seconds:
                xs += [starts[place] / scale, (starts[place] + seconds) / scale, None]
                ys += [height, height, None]
            starts[place] += seconds
        if xs:
            width = max(2.0, min(THICKEST, ROOM / len(shown)))
            look = {"color": PHASE_COLOURS[phase], "width": width, "simplify": False}
            hover = f"{phase}<br>%{{x:.4g}} {unit}<extra></extra>"
            lines = {"mode": "lines", "line": look, "marker": {"color": look["color"]}, "hovertemplate": hover}
            drawn.append(go.Scatter(x=rounded(xs), y=ys, name=phase, connectgaps=False, **lines))
    end = clock["seconds"] / scale
    edge = {"color": "#566074", "dash": "dash", "width": 2}
    drawn.append(
        go.Scatter(
            x=rounded([end, end]), y=[-0.5, len(shown) - 0.5], mode="lines", line=edge, marker={"color": edge["color"]},
            name="end of the round", hovertemplate=f"end of the round: %{{x:.4g}} {unit}<extra></extra>",
        )
    )  # fmt: skip
    labels = [plain(_label(clock, place)) for place in shown]
    rows = [
        [_label(clock, place), *(four_digits(clock[phase][place]) for phase in PHASES), clock["outcomes"][place]]
        for place in reversed(shown)
    ]
    few = f" ({len(shown)} of {len(order)} clients)" if len(shown) < len(order) else ""
    caption = (
        f"Round {run.last_round} on the virtual clock{few}: what each client does, one bar per client, the fastest on "
        "top. The server takes no answers after the end of the round."
    )
    table = Table(["client", *(f"{phase} (s)" for phase in PHASES), "outcome"], rows, f"Seconds in the round{few}")
    name, title = f"timeline-{group.slug}", f"{group.label}: timeline of round {run.last_round}"
    ticks = {"yaxis_tickvals": list(range(len(shown))), "yaxis_ticktext": labels}
    layout = {**ticks, "yaxis_range": [-0.7, len(shown) - 0.3], "xaxis_rangemode": "tozero", "showlegend": True}
    made = figure(name, title, caption, drawn, (unit, ""), table, **layout)
    return replace(made, tall=True)


def _seconds(clock: Mapping[str, Any], place: int) -> float:
    return float(sum(clock[phase][place] for phase in PHASES))


def _label(clock: Mapping[str, Any], place: int) -> str:
    outcome = clock["outcomes"][place]
    words = [f"client {clock['clients'][place]}", clock["devices"][place], *([] if outcome == "used" else [outcome])]
    return ", ".join(words)
