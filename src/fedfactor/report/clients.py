"""The clients: how well each one is served, against Local and FedAvg, and who has which data (FedDecomp, Fig. 7, 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedfactor.report.groups import Group
from fedfactor.report.parts import (
    MOST_POINTS,
    MOST_ROWS,
    Figure,
    Piece,
    Section,
    Table,
    Text,
    axes,
    colour,
    dash,
    label,
    number,
    percent,
    sentence,
    thin,
)
from fedfactor.report.read import MEASURED, RunData

REFERENCES = {"local": "Local", "fedavg": "FedAvg"}
KINDS = ("all", "selected_after")
"""Measurements that know whose score is whose, the best first."""


def clients(groups: Sequence[Group]) -> Section:
    """Return accuracies by client, sorted, and what clients gain on Local and FedAvg."""
    runs = [run for group in groups for run in group.runs]
    kind = next((key for key in KINDS if all(key in run.clients for run in runs)), None)
    kind = kind or next((key for key in KINDS if any(key in run.clients for run in runs)), None)
    if kind is None:
        return Section("clients", "Clients", [Text("No run has measured its clients (evaluate.clients).")])
    pieces: list[Piece] = [_sorted(groups, kind)]
    for method, name in REFERENCES.items():
        reference = [group for group in groups if group.method == method]
        others = [group for group in groups if group.method != method]
        if len(reference) == 1 and others:
            pieces += _against(others, reference[0], name, kind)
    return Section("clients", "Clients", pieces)


def _shown(group: Group, kind: str) -> RunData | None:
    """Return the run that stands for a group: the first that has measured its clients."""
    return next((run for run in group.runs if kind in run.clients), None)


def _sorted(groups: Sequence[Group], kind: str) -> Figure:
    found = [(group, run) for group in groups if (run := _shown(group, kind))]
    traces, rows = [], []
    for group, run in found:
        round, scores = run.clients[kind]
        order = sorted(scores.items(), key=lambda pair: (pair[1], pair[0]))
        ranks = [100 * (place + 0.5) / len(order) for place in range(len(order))]
        shown = thin(list(zip(ranks, order, strict=True)), MOST_POINTS)
        traces.append(_line(group, [x for x, _ in shown], [100 * y for _, (_, y) in shown]))
        traces[-1]["text"] = [f"client {who}" for _, (who, _) in shown]
        for client, value in thin(order, max(5, MOST_ROWS // len(found))):
            rows.append([group.label, str(client), percent(value), str(round)])
    return Figure(
        "clients-sorted",
        "Accuracy by client, sorted",
        f"{sentence(MEASURED[kind])}, in each run's own best round; a group's first run stands for it.",
        traces,
        axes("per cent of the clients, worst first", "accuracy in per cent", x_range=[0, 100]),
        Table(["run", "client", "accuracy", "round"], rows, "Clients, worst first, evenly chosen where there are many"),
    )


def _against(groups: Sequence[Group], reference: Group, name: str, kind: str) -> list[Piece]:
    traces, rows, counts = [], [], []
    for group in groups:
        pair = _pair(group, reference, kind)
        if pair is None:
            continue
        mine, theirs = (run.clients[kind][1] for run in pair)
        gains = sorted((mine[client] - theirs[client], client) for client in mine.keys() & theirs.keys())
        if not gains:
            continue
        places = [100 * (place + 0.5) / len(gains) for place in range(len(gains))]
        shown = thin(list(zip(places, gains, strict=True)), MOST_POINTS)
        traces.append(_line(group, [x for x, _ in shown], [100 * gain for _, (gain, _) in shown]))
        traces[-1]["text"] = [f"client {client}" for _, (_, client) in shown]
        wins, losses = sum(gain > 0 for gain, _ in gains), sum(gain < 0 for gain, _ in gains)
        middle = sum(gain for gain, _ in gains) / len(gains)
        words = [group.label, str(pair[0].seed[0]), str(len(gains)), str(wins), str(len(gains) - wins - losses)]
        counts.append([*words, str(losses), _points(middle), _points(gains[0][0])])
        for gain, client in thin(gains, max(5, MOST_ROWS // len(groups))):
            rows.append([group.label, str(client), _points(gain)])
    if not traces:
        return [Text(f"No run has the seed and the clients of {name}'s.")]
    low = name.lower()
    head = ["run", "seed", "clients", "win", "tie", "lose", "mean gain", "worst gain"]
    figure = Figure(
        f"against-{low}",
        f"What clients gain over {name}",
        f"Accuracy of a client's model less that under {name} with the same seed, sorted; below 0 clients lose. In "
        "each run's own best round.",
        traces,
        axes("per cent of the clients, worst first", f"points over {name}", x_range=[0, 100], y_zeroline=True),
        Table(["run", "client", f"points over {name}"], rows, f"Gains over {name}, evenly chosen where there are many"),
    )
    return [figure, Table(head, counts, f"How many clients win and lose against {name}")]


def _pair(group: Group, reference: Group, kind: str) -> tuple[RunData, RunData] | None:
    """Return a run of each with the same seed."""
    for run in group.runs:
        for other in reference.runs:
            if run.seed == other.seed and kind in run.clients and kind in other.clients:
                return run, other
    return None


def _points(value: float) -> str:
    return f"{100 * value:+.2f}"


def _line(group: Group, xs: Sequence[float], ys: Sequence[float]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines" if len(xs) > 1 else "markers",
        "x": [number(x) for x in xs],
        "y": [number(y) for y in ys],
        "name": label(group.label),
        "line": {"color": colour(group.number), "dash": dash(group.number), "width": 2},
        "marker": {"color": colour(group.number)},
        "hovertemplate": "%{fullData.name}<br>%{text}: %{y:.2f}<extra></extra>",
        "meta": group.number,
    }


def data(groups: Sequence[Group]) -> Section:
    """Return who has how much of what, once for every split."""
    splits: dict[str, tuple[RunData, list[str]]] = {}
    missing = []
    for group in groups:
        for run in group.runs:
            if "examples" in run.task:
                splits.setdefault(str(run.task["examples"]), (run, []))[1].append(run.name)
            else:
                missing.append(run.name)
    pieces: list[Piece] = []
    if missing:
        pieces.append(Text(f"Not known of {', '.join(missing)}: task.json there does not say who has what."))
    for place, (run, names) in enumerate(splits.values()):
        pieces.append(_dots(place, run, "all runs" if len(splits) == 1 and not missing else ", ".join(names)))
    return Section("data", "Who has which data", pieces)


def _dots(place: int, run: RunData, names: str) -> Figure:
    counts: list[list[int]] = run.task["examples"]
    everybody, classes = run.task["clients"], [str(name) for name in run.task["class_names"]]
    classes += [str(extra) for extra in range(len(classes), max(map(len, counts), default=0))]
    dots = [(client, which, n) for client, row in enumerate(counts) for which, n in enumerate(row) if n]
    most = max((n for _, _, n in dots), default=1)
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [client for client, _, _ in dots],
        "y": [which for _, which, _ in dots],
        "text": [label(f"client {c}, {classes[w]}: {n}") for c, w, n in dots],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "size": [n for _, _, n in dots],
            "sizemode": "area",
            "sizeref": number(2 * most / 18**2),
            "color": colour(0),
            "line": {"width": 0},
        },
    }
    some = "" if len(counts) == everybody else f" The first {len(counts)} of {everybody} clients are shown."
    ticks = thin(range(len(classes)), 30)
    layout = axes("client", "class", y_tickvals=ticks, y_ticktext=[label(classes[tick]) for tick in ticks])
    rows = [[str(client), *map(str, row), str(sum(row))] for client, row in enumerate(counts)]
    split = ", ".join(f"{key} {value}" for key, value in run.tables.get("partition", {}).items())
    return Figure(
        f"data-{place}",
        f"Training examples by client and class{'' if place == 0 else f' ({place + 1})'}",
        f"The area of a dot is the number of examples.{some} Split: {split}. Of {names}.",
        [trace],
        layout,
        Table(["client", *classes, "all"], rows, "Training examples of each client by class"),
        tall=len(classes) > 12,
    )
