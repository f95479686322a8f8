"""The overview table, and accuracy over rounds, bytes and capacities."""

from __future__ import annotations

from collections.abc import Sequence

from fedfactor.report.elements import Element, Figure, Fold, Section, Table, Text
from fedfactor.report.groups import Group, written
from fedfactor.report.plots import ACCURACY, MOST_ROWS, Curve, colour, dash, figure, over_rounds, thinned, traces
from fedfactor.report.read import MEASURED, Series, best, first_shared, last, measured, summed
from fedfactor.report.values import UNITS, amount, percent, size, span, thin, unit_for


def main_measure(groups: Sequence[Group]) -> str | None:
    """Return the measurement to compare by: the first that all runs have, else the first that any run has."""
    runs = [run for group in groups for run in group.runs]
    return first_shared(MEASURED, runs, lambda run, key: run.accuracy.get(key))


def overview(groups: Sequence[Group], measure: str | None, remarks: Sequence[str]) -> Section:
    """Return one row per group: accuracy, cost and failures."""
    score = measured(measure or "")
    rows = []
    for group in groups:
        moved, dense = group.over(last(summed("bytes"))), group.over(last(summed("dense")))
        ends = sorted({run.last_round for run in group.runs})
        planned = max(run.rounds for run in group.runs)
        done = "-".join(dict.fromkeys([str(ends[0]), str(ends[-1])]))
        ratio = dense.value / moved.value if moved and dense and moved.value else 0.0
        row = {
            "run": group.label,
            "seeds": str(len(group.runs)),
            "rounds": done if ends[0] == planned else f"{done} of {planned}",
            "last accuracy": written(group.over(last(score)), percent),
            "best accuracy": written(group.over(best(score)), percent),
            "moved": written(moved, size),
            "dense FedAvg moves": f"{ratio:.2f}x" if ratio else "-",
            "MACs": written(group.over(last(summed("macs"))), amount),
            "time": written(group.over(last(summed("seconds"))), span),
            "failures": str(sum(len(run.failures) for run in group.runs)),
        }
        rows.append(row)
    trained = [sorted({level for run in group.runs for level in run.trained}, reverse=True) for group in groups]
    if any(levels and levels != [1.0] for levels in trained):
        for row, levels in zip(rows, trained, strict=True):
            row["trained capacity"] = ", ".join(f"{level:g}" for level in levels) or "-"
    printed = [group.runs[0].tables.get("paper", {}).get("accuracy") for group in groups]
    if any(value is not None for value in printed):
        for row, value in zip(rows, printed, strict=True):
            row["paper's accuracy"] = "-" if value is None else str(value)
    of = MEASURED[measure] if measure else "not measured"
    caption = f"All runs. Accuracy: {of}; ± is the 95 % interval of the mean over seeds"
    note = "The best accuracy is selected on the test data on which it is measured."
    table = Table(list(rows[0]), [list(row.values()) for row in rows], caption)
    return Section("overview", "Overview", [table, *map(Text, [note, *remarks])])


def accuracy(groups: Sequence[Group], main: str | None) -> Section:
    """Return accuracy against rounds and against bytes, for each measurement."""
    if main is None:
        return Section("accuracy", "Accuracy", [Text("No run has measured an accuracy yet.")])
    runs = [run for group in groups for run in group.runs]
    others = [key for key in MEASURED if key != main and any(run.accuracy.get(key) for run in runs)]
    folds = [Fold(f"Measured: {MEASURED[key]}", _pair(groups, key)) for key in others]
    return Section("accuracy", "Accuracy", [*_pair(groups, main), *folds])


def _pair(groups: Sequence[Group], key: str) -> list[Figure]:
    caption = f"{MEASURED[key].capitalize()}. Mean over seeds; bands are 95 % intervals."
    curves = [Curve.of(group, group.curve(measured(key))) for group in groups]
    title, table = "Accuracy against rounds", "Accuracy by round"
    return [
        over_rounds(f"accuracy-by-round-{key}", title, caption, curves, ACCURACY, table),
        _against_bytes(groups, key),
    ]


def _against_bytes(groups: Sequence[Group], key: str) -> Figure:
    drawn, rows = [], []
    ends = [total.value for group in groups if (total := group.over(last(summed("bytes"))))]
    scale, unit, units = unit_for(ends, UNITS["bytes"])
    for group in groups:
        moved = dict(group.curve(summed("bytes")))
        points = [(t, moved[t].value / scale, one) for t, one in group.curve(measured(key)) if t in moved]
        drawn += traces(Curve.of(group, [(x, one) for _, x, one in points]), ACCURACY, f"%{{x:.4g}} {unit}")
        shown = thin(points, max(5, MOST_ROWS // len(groups)))
        rows += [[group.label, f"{t:.0f}", f"{x:.4g}", one.text(percent)] for t, x, one in shown]
    title, axes = f"Accuracy against {units}", (f"{unit} moved", ACCURACY.title)
    caption = f"{MEASURED[key].capitalize()}. Bytes: downloads and uploads of all clients in training. Mean over seeds."
    table = Table(["run", "round", unit, "accuracy"], rows, f"Accuracy by {units}" + thinned(rows))
    return figure(f"accuracy-by-bytes-{key}", title, caption, drawn, axes, table, xaxis_rangemode="tozero")


def capacities(groups: Sequence[Group]) -> Section | None:
    """Return the accuracy of the server's model by capacity, if there are several (FLANC, Figures 3 and 4)."""
    measured_at = [group for group in groups if group.runs[0].by_level]
    levels = sorted({float(level) for group in measured_at for level in group.runs[0].by_level})
    if len(levels) < 2:
        return None
    drawn, rows, folds = [], [], list[Element]()
    for group in measured_at:
        ends = {level: group.over(last(_at_level(f"{level:g}"))) for level in levels}
        curve = Curve.of(group, [(level, one) for level, one in ends.items() if one])
        drawn += traces(curve, ACCURACY, "capacity %{x}")
        rows.append([group.label, *(written(one, percent) for one in ends.values())])
        if len(group.runs[0].by_level) > 1:
            folds.append(Fold(f"Over rounds: {group.label}", [_levels_over_rounds(group)]))
    title, axes = "Accuracy by capacity", ("capacity", ACCURACY.title)
    caption = (
        "The server's model at each capacity, on the central test set, after the last measured round. A method that "
        "ignores capacities has one model."
    )
    table = Table(["run", *(f"{level:g}" for level in levels)], rows, "Last accuracy by capacity")
    return Section("capacity", title, [figure("accuracy-by-capacity", title, caption, drawn, axes, table), *folds])


def _levels_over_rounds(group: Group) -> Figure:
    levels = sorted(group.runs[0].by_level, key=float, reverse=True)
    curves = [
        Curve(f"capacity {level}", group.curve(_at_level(level)), colour(place), dash(place))
        for place, level in enumerate(levels)
    ]
    name, title = f"accuracy-by-capacity-{group.slug}", f"{group.label}: accuracy by capacity over rounds"
    caption = "The server's model on the central test set. Mean over seeds; bands are 95 % intervals."
    return over_rounds(name, title, caption, curves, ACCURACY, "Accuracy by round and capacity", showlegend=True)


def _at_level(level: str) -> Series:
    return lambda run: run.by_level.get(level, [])
