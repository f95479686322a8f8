"""Accuracy against rounds, gigabytes and capacity, and the table at the top."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedfactor.report.groups import Group, Mean
from fedfactor.report.parts import (
    BYTES,
    MOST_POINTS,
    MOST_ROWS,
    Figure,
    Fold,
    Piece,
    Section,
    Table,
    Text,
    amount,
    at_or_before,
    axes,
    lines,
    percent,
    sentence,
    span,
    thin,
    unit_for,
)
from fedfactor.report.read import MEASURED, Point, RunData

Series = Callable[[RunData], Sequence[Point]]


def main_measure(groups: Sequence[Group]) -> str | None:
    """Return the measurement that a comparison goes by: the first that all runs have, else the first that any has."""
    runs = [run for group in groups for run in group.runs]
    shared = [key for key in MEASURED if all(run.accuracy.get(key) for run in runs)]
    there = [key for key in MEASURED if any(run.accuracy.get(key) for run in runs)]
    return next(iter([*shared, *there]), None)


def measured(key: str) -> Series:
    """Return the series of a measurement."""
    return lambda run: run.accuracy.get(key, [])


def summed(key: str) -> Series:
    """Return the series of a cost."""
    return lambda run: run.totals.get(key, [])


def last(series: Series) -> Callable[[RunData], float | None]:
    """Return the last value of a series."""
    return lambda run: points[-1][1] if (points := series(run)) else None


def best(series: Series) -> Callable[[RunData], float | None]:
    """Return the largest value of a series."""
    return lambda run: max((value for _, value in series(run)), default=None)


def overview(groups: Sequence[Group], measure: str | None, remarks: Sequence[str]) -> Section:
    """Return a row a group: how well, how much, how long."""
    score = measured(measure or "")
    rows = []
    for group in groups:
        moved, dense = group.over(last(summed("bytes"))), group.over(last(summed("dense")))
        fewer = f"{dense.value / moved.value:.2f}x" if moved and dense and dense.value and moved.value else "-"
        ends = sorted({run.last_round for run in group.runs})
        planned = max(run.rounds for run in group.runs)
        rows.append(
            [
                group.label,
                str(len(group.runs)),
                "-".join(dict.fromkeys([str(ends[0]), str(ends[-1])]))
                + ("" if ends[0] == planned else f" of {planned}"),
                _text(group.over(last(score)), percent),
                _text(group.over(best(score)), percent),
                _text(moved, lambda x: amount(x, "B")),
                fewer,
                _text(group.over(last(summed("macs"))), amount),
                _text(group.over(last(summed("seconds"))), span),
                str(sum(len(run.failures) for run in group.runs)),
            ]
        )
    of = MEASURED[measure] if measure else "not measured"
    head = ["run", "seeds", "rounds", "last accuracy", "best accuracy", "moved", "dense FedAvg moves", "MACs", "took"]
    head.append("failures")
    printed = [group.runs[0].tables.get("paper", {}).get("accuracy") for group in groups]
    if any(value is not None for value in printed):
        head.append("paper's accuracy")
        rows = [[*row, "-" if value is None else str(value)] for row, value in zip(rows, printed, strict=True)]
    table = Table(head, rows, f"All runs. Accuracy: {of}; ± is the 95 % interval of the mean over seeds")
    notes = "Best accuracies are chosen on the test data that they are measured on."
    return Section("overview", "At a glance", [table, *map(Text, [notes, *remarks])])


def accuracy(groups: Sequence[Group], main: str | None) -> Section:
    """Return accuracy against rounds and gigabytes, for every measurement there is."""
    found = [key for key in MEASURED if any(run.accuracy.get(key) for group in groups for run in group.runs)]
    order = sorted(found, key=lambda key: key != main)
    if not order:
        return Section("accuracy", "Accuracy", [Text("No run has measured an accuracy yet.")])
    pieces: list[Piece] = [*_pair(groups, order[0])]
    pieces += [Fold(f"Measured: {MEASURED[key]}", _pair(groups, key)) for key in order[1:]]
    return Section("accuracy", "Accuracy", pieces)


def _pair(groups: Sequence[Group], key: str) -> list[Piece]:
    return [_against_rounds(groups, key), _against_bytes(groups, key)]


def _against_rounds(groups: Sequence[Group], key: str) -> Figure:
    curves = {group.number: group.curve(measured(key)) for group in groups}
    traces = [
        trace
        for group in groups
        if (points := thin(curves[group.number], MOST_POINTS))
        for trace in lines(
            group,
            [round for round, _ in points],
            [one for _, one in points],
            hover="%{fullData.name}<br>round %{x}: %{y:.2f} %<extra></extra>",
            scale=100,
            limits=(0, 1),
        )
    ]
    rounds = thin(sorted({round for curve in curves.values() for round, _ in curve}), MOST_ROWS)
    there = {number: dict(curve) for number, curve in curves.items()}
    rows = [[str(t), *(_text(there[group.number].get(t), percent) for group in groups)] for t in rounds]
    return Figure(
        f"rounds-{key}",
        "Accuracy against rounds",
        f"{sentence(MEASURED[key])}. Mean over seeds; bands are its 95 % interval.",
        traces,
        axes("round", "accuracy in per cent", x_rangemode="tozero"),
        Table(["round", *(group.label for group in groups)], rows, "Accuracy by round" + _thinned(rows)),
    )


def _against_bytes(groups: Sequence[Group], key: str) -> Figure:
    traces, rows = [], []
    scale, unit, units = unit_for((total for group in groups if (total := _moved(group))), BYTES)
    for group in groups:
        moved = dict(group.curve(summed("bytes")))
        points = [(moved[t].value / scale, t, one) for t, one in group.curve(measured(key)) if t in moved]
        shown = thin(points, MOST_POINTS)
        if shown:
            traces += lines(
                group,
                [size for size, _, _ in shown],
                [one for _, _, one in shown],
                hover=f"%{{fullData.name}}<br>%{{x:.4g}} {unit}: %{{y:.2f}} %<extra></extra>",
                scale=100,
                limits=(0, 1),
            )
        for size, t, one in thin(points, max(5, MOST_ROWS // len(groups))):
            rows.append([group.label, str(t), f"{size:.4g}", one.text(percent)])
    return Figure(
        f"bytes-{key}",
        f"Accuracy against {units}",
        f"{sentence(MEASURED[key])}. Bytes of training, down and up, of all clients; mean over seeds.",
        traces,
        axes(f"{unit} moved", "accuracy in per cent", x_rangemode="tozero"),
        Table(["run", "round", unit, "accuracy"], rows, f"Accuracy by {units}" + _thinned(rows)),
    )


def _moved(group: Group) -> float:
    total = group.over(last(summed("bytes")))
    return total.value if total else 0.0


def capacities(groups: Sequence[Group]) -> Section | None:
    """Return the accuracy of the server's model by capacity, where there is more than one (FLANC, Figures 3 and 4)."""
    several = [group for group in groups if len(group.runs[0].by_level) > 1]
    if not several:
        return None
    levels = sorted({float(level) for group in several for level in group.runs[0].by_level})
    traces, rows, folds = [], [], list[Piece]()
    for group in several:
        ends = {level: group.over(last(_level(f"{level:g}"))) for level in levels}
        there = {level: one for level, one in ends.items() if one}
        drawn = lines(
            group,
            list(there),
            list(there.values()),
            hover="%{fullData.name}<br>capacity %{x}: %{y:.2f} %<extra></extra>",
            scale=100,
            limits=(0, 1),
        )
        drawn[-1]["mode"] = "lines+markers"
        traces += drawn
        rows.append([group.label, *(_text(one, percent) for one in ends.values())])
        folds.append(Fold(f"Over rounds: {group.label}", [_by_level(group)]))
    head = ["run", *(f"{level:g}" for level in levels)]
    figure = Figure(
        "capacities",
        "Accuracy by capacity",
        "The server's model at every capacity, on the central test set after the last round that was measured.",
        traces,
        axes("capacity", "accuracy in per cent"),
        Table(head, rows, "Last accuracy by capacity"),
    )
    return Section("capacity", "Accuracy by capacity", [figure, *folds])


def _by_level(group: Group) -> Figure:
    levels = sorted(group.runs[0].by_level, key=float, reverse=True)
    curves = {level: group.curve(_level(level)) for level in levels}
    traces = []
    for place, level in enumerate(levels):
        points = thin(curves[level], MOST_POINTS)
        one = Group(place, f"capacity {level}")
        hover = "%{fullData.name}<br>round %{x}: %{y:.2f} %<extra></extra>"
        traces += lines(
            one, [t for t, _ in points], [mean for _, mean in points], hover=hover, scale=100, limits=(0, 1)
        )
    for trace in traces:
        del trace["meta"]  # these are no groups to choose from
    there = {level: dict(curve) for level, curve in curves.items()}
    rounds = thin(sorted({t for curve in curves.values() for t, _ in curve}), MOST_ROWS)
    rows = [[str(t), *(_text(there[level].get(t), percent) for level in levels)] for t in rounds]
    return Figure(
        f"levels-{group.number}",
        f"{group.label}: accuracy by capacity over rounds",
        "The server's model on the central test set. Mean over seeds; bands are its 95 % interval.",
        traces,
        axes("round", "accuracy in per cent", x_rangemode="tozero", showlegend=True),
        Table(["round", *levels], rows, "Accuracy by round and capacity" + _thinned(rows)),
    )


def _level(level: str) -> Series:
    return lambda run: run.by_level.get(level, [])


def _thinned(rows: Sequence[object]) -> str:
    return f" (some {len(rows)} rows; metrics.jsonl of the runs has all)" if len(rows) >= MOST_ROWS else ""


def _text(one: Mean | None, form: Callable[[float], str]) -> str:
    return "-" if one is None else one.text(form)


def at_round(series: Series, round: int) -> Callable[[RunData], float | None]:
    """Return the value of a series in a round, or in the last before it that has one."""
    return lambda run: at_or_before(series(run), round)
