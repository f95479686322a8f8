"""Clients: the score of each, gains over Local and FedAvg, and the data of each (FedDecomp, Figures 7 and 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import plotly.graph_objects as go

from fedfactor.report.elements import Element, Figure, Section, Table, Text
from fedfactor.report.groups import Group
from fedfactor.report.plots import MOST_POINTS, MOST_ROWS, colour, dash, figure, line, plain, scale_of
from fedfactor.report.read import MEASURED, RunData, first_shared
from fedfactor.report.values import thin
from fedfactor.task import Decider

REFERENCES = {"local": "Local", "fedavg": "FedAvg"}
KINDS = ("all", "selected_after")
"""Measurements with one score per client, the preferred one first."""
SHARE = "per cent of the clients, worst first"
LARGEST_DOT = 18
"""Diameter in pixels."""
MOST_TICKS = 30
MOST_ON_LOW = 12
"""More classes than this need a taller figure."""


def clients(groups: Sequence[Group]) -> Section:
    """Return the sorted scores of clients, and what clients gain over Local and over FedAvg."""
    runs = [run for group in groups for run in group.runs]
    kind = first_shared(KINDS, runs, lambda run, key: key in run.clients)
    if kind is None:
        return Section("clients", "Clients", [Text("No run has measured single clients (evaluate.clients).")])
    elements: list[Element] = [_sorted(groups, kind)]
    for method, name in REFERENCES.items():
        reference = [group for group in groups if group.method == method]
        others = [group for group in groups if group.method != method]
        if len(reference) == 1 and others:
            elements += _against(others, reference[0], name, kind)
    return Section("clients", "Clients", elements)


def _sorted(groups: Sequence[Group], kind: str) -> Figure:
    measured = [(group, [run for run in group.runs if kind in run.clients]) for group in groups]
    found = [(group, runs[0].clients[kind]) for group, runs in measured if runs]
    drawn, rows, decider = [], [], groups[0].decider
    for group, (round, scores) in found:
        order = sorted(((score, client) for client, score in scores.items()), reverse=not decider.higher_is_better)
        drawn.append(_line(group, order))
        shown = thin(order, max(5, MOST_ROWS // len(found)))
        rows += [[group.label, str(client), decider.text(score), str(round)] for score, client in shown]
    title, axes = f"{decider.title} by client, sorted", (SHARE, scale_of(decider).title)
    caption = f"{MEASURED[kind].capitalize()}, in the best round of a run. A group is represented by its first run."
    words = "Clients, worst first (an even selection if there are many)"
    table = Table(["run", "client", decider.name, "round"], rows, words)
    return figure("clients-sorted", title, caption, drawn, axes, table, xaxis_range=[0, 100])


def _against(groups: Sequence[Group], reference: Group, name: str, kind: str) -> list[Element]:
    drawn, rows, counts, decider = [], [], [], reference.decider
    for group in groups:
        seed, gains = _gains(group, reference, kind)
        if not gains:
            continue
        drawn.append(_line(group, gains))
        wins, losses = sum(gain > 0 for gain, _ in gains), sum(gain < 0 for gain, _ in gains)
        numbers = [seed, len(gains), wins, len(gains) - wins - losses, losses]
        average = sum(gain for gain, _ in gains) / len(gains)
        counts.append([group.label, *map(str, numbers), _points(average, decider), _points(gains[0][0], decider)])
        shown = thin(gains, max(5, MOST_ROWS // len(groups)))
        rows += [[group.label, str(client), _points(gain, decider)] for gain, client in shown]
    if not drawn:
        return [Text(f"No run has the seed and the clients of a run of {name}.")]
    title, gained = f"What clients gain over {name}", f"{'points' if decider.is_share else decider.name} over {name}"
    better = f"minus its {decider.name}" if decider.higher_is_better else "subtracted from that"
    caption = (
        f"{decider.title} of each client's model {better} under {name} with the same seed, sorted. Clients below 0 "
        "lose. In the best round of each run."
    )
    words = f"Gains over {name} (an even selection of clients if there are many)"
    table, layout = Table(["run", "client", gained], rows, words), {"xaxis_range": [0, 100], "yaxis_zeroline": True}
    plot = figure(f"clients-against-{name.lower()}", title, caption, drawn, (SHARE, gained), table, **layout)
    head = ["run", "seed", "clients", "win", "tie", "lose", "mean gain", "worst gain"]
    return [plot, Table(head, counts, f"How many clients win and lose against {name}")]


def _gains(group: Group, reference: Group, kind: str) -> tuple[int, list[tuple[float, int]]]:
    """Return the seed that two runs share, and what each client gains, sorted. No such runs: no gains."""
    for run, other in product(group.runs, reference.runs):
        if run.seed == other.seed and kind in run.clients and kind in other.clients:
            mine, theirs = run.clients[kind][1], other.clients[kind][1]
            shared = mine.keys() & theirs.keys()
            return run.seed[0], sorted(
                (run.decider.goodness(mine[client] - theirs[client]), client) for client in shared
            )
    return 0, []


def _points(value: float, decider: Decider) -> str:
    return f"{100 * value:+.2f}" if decider.is_share else f"{value:+.4g}"


def _line(group: Group, values: Sequence[tuple[float, int]]) -> go.Scatter:
    """Draw sorted values, each with its client, against the percentage of clients."""
    points = [(100 * (place + 0.5) / len(values), *pair) for place, pair in enumerate(values)]
    shown = thin(points, MOST_POINTS)
    factor, form = (100, ".2f") if group.decider.is_share else (1, ".4g")
    xs, ys, names = [x for x, *_ in shown], [factor * y for _, y, _ in shown], [f"client {who}" for *_, who in shown]
    style = colour(group.number), dash(group.number)
    return line(group.label, xs, ys, *style, f"%{{text}}: %{{y:{form}}}", text=names, meta=group.number)


def data(groups: Sequence[Group]) -> Section:
    """Return how many examples of each class each client has, once per partition."""
    partitions: dict[str, list[RunData]] = {}
    missing = []
    for run in (run for group in groups for run in group.runs):
        if "examples" in run.task:
            partitions.setdefault(str(run.task["examples"]), []).append(run)
        else:
            missing.append(run.name)
    elements: list[Element] = []
    if missing:
        elements.append(Text(f"Unknown for {', '.join(missing)}: task.json there does not list the clients' examples."))
    for place, runs in enumerate(partitions.values()):
        names = "all runs" if len(partitions) == 1 and not missing else ", ".join(run.name for run in runs)
        elements.append(_dots(place, runs[0].task, runs[0].tables.get("partition", {}), names))
    return Section("data", "Data of the clients", elements)


def _dots(place: int, task: Any, partition: Any, names: str) -> Figure:
    counts: list[list[int]] = task["examples"]
    classes = [str(name) for name in task["class_names"]]
    classes += [str(extra) for extra in range(len(classes), max(map(len, counts), default=0))]
    dots = [(client, label, n) for client, row in enumerate(counts) for label, n in enumerate(row) if n]
    sizes = [n for _, _, n in dots]
    scale = 2 * max(sizes, default=1) / LARGEST_DOT**2
    drawn = go.Scatter(
        mode="markers",
        x=[client for client, _, _ in dots],
        y=[label for _, label, _ in dots],
        text=[plain(f"client {client}, {classes[label]}: {n}") for client, label, n in dots],
        hovertemplate="%{text}<extra></extra>",
        marker={"size": sizes, "sizemode": "area", "sizeref": scale, "color": colour(0), "line": {"width": 0}},
    )
    some = "" if len(counts) == task["clients"] else f" The first {len(counts)} of {task['clients']} clients are shown."
    split = ", ".join(f"{key} {value}" for key, value in partition.items())
    ticks = thin(range(len(classes)), MOST_TICKS)
    rows = [[str(client), *map(str, row), str(sum(row))] for client, row in enumerate(counts)]
    title = f"Training examples by client and class{'' if place == 0 else f' ({place + 1})'}"
    caption = f"The area of a dot is the number of examples.{some} Partition: {split}. Used by {names}."
    table = Table(["client", *classes, "all"], rows, "Training examples of each client by class")
    layout = {"yaxis_tickvals": ticks, "yaxis_ticktext": [plain(classes[tick]) for tick in ticks]}
    dotted = figure(f"examples-by-class-{place}", title, caption, [drawn], ("client", "class"), table, **layout)
    return replace(dotted, tall=len(classes) > MOST_ON_LOW)
