"""The overview table, and metrics over rounds, bytes and capacities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedfactor.report.elements import Element, Figure, Fold, Section, Table, Text
from fedfactor.report.groups import Group, written
from fedfactor.report.plots import MOST_ROWS, Curve, Scale, colour, dash, figure, over_rounds, scale_of, thinned, traces
from fedfactor.report.read import MEASURED, Series, best, first_shared, last, measured, summed
from fedfactor.report.values import UNITS, amount, size, span, thin, unit_for


def main_measure(groups: Sequence[Group]) -> str | None:
    """Return the measurement to compare by: the first that all runs have, else the first that any run has."""
    runs = [run for group in groups for run in group.runs]
    return first_shared(MEASURED, runs, lambda run, key: run.scores.get(key))


def overview(groups: Sequence[Group], measure: str | None, remarks: Sequence[str]) -> Section:
    """Return one row per group: the deciding metric, cost and failures."""
    score, decider = measured(measure or ""), groups[0].decider
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
            f"last {decider.name}": written(group.over(last(score)), decider.text),
            f"best {decider.name}": written(group.over(best(score)), decider.text),
            "moved": written(moved, size),
            "dense FedAvg moves": f"{ratio:.2f}x" if ratio else "-",
            "MACs": written(group.over(last(summed("macs"))), amount),
            "time": written(group.over(last(summed("seconds"))), span),
            "failures": str(sum(len(run.failures) for run in group.runs)),
        }
        rows.append(row)
    if any(run.timeline for group in groups for run in group.runs):
        for row, group in zip(rows, groups, strict=True):
            row["time on the fleet"] = written(group.over(last(summed("simulated_seconds"))), span)
    trained = [sorted({level for run in group.runs for level in run.trained}, reverse=True) for group in groups]
    if any(levels and levels != [1.0] for levels in trained):
        for row, levels in zip(rows, trained, strict=True):
            row["trained capacity"] = ", ".join(f"{level:g}" for level in levels) or "-"
    printed = [group.runs[0].tables.get("paper", {}).get("accuracy") for group in groups]
    if any(value is not None for value in printed):
        for row, value in zip(rows, printed, strict=True):
            row["paper's accuracy"] = "-" if value is None else str(value)
    of = MEASURED[measure] if measure else "not measured"
    caption = f"All runs. {decider.title}: {of}; ± is the 95 % interval of the mean over seeds"
    note = f"The best {decider.name} is the {decider.best}. It is selected on the test data on which it is measured."
    table = Table(list(rows[0]), [list(row.values()) for row in rows], caption)
    return Section("overview", "Overview", [table, *map(Text, [note, *remarks])])


def scores(groups: Sequence[Group], main: str | None) -> Section:
    """Return the deciding metric against rounds and against bytes for each measurement, and all other metrics."""
    decider = groups[0].decider
    title = decider.title
    if main is None:
        return Section("scores", title, [Text(f"No run has measured its {decider.name} yet.")])
    runs = [run for group in groups for run in group.runs]
    others = [key for key in MEASURED if key != main and any(run.scores.get(key) for run in runs)]
    folds = [Fold(f"Measured: {MEASURED[key]}", _pair(groups, key)) for key in others]
    metrics = dict.fromkeys(metric for run in runs for metric in run.others.get(main, ()))
    folds += [Fold(f"Other metrics: {metric}", [_other(groups, main, metric)]) for metric in metrics]
    return Section("scores", title, [*_pair(groups, main), *folds])


def _other(groups: Sequence[Group], key: str, metric: str) -> Figure:
    """Return a metric that does not decide, against rounds."""
    curves = [Curve.of(group, group.curve(lambda run: run.others[key].get(metric, []))) for group in groups]
    caption = f"{MEASURED[key].capitalize()}. Mean over seeds; bands are 95 % intervals."
    title = f"{metric} against rounds"
    return over_rounds(f"{metric}-by-round-{key}", title, caption, curves, Scale(metric), f"{metric} by round")


def _pair(groups: Sequence[Group], key: str) -> list[Figure]:
    caption = f"{MEASURED[key].capitalize()}. Mean over seeds; bands are 95 % intervals."
    curves = [Curve.of(group, group.curve(measured(key))) for group in groups]
    decider = groups[0].decider
    name, title, table = (
        f"{decider.name}-by-round-{key}",
        f"{decider.title} against rounds",
        f"{decider.title} by round",
    )
    return [
        over_rounds(name, title, caption, curves, scale_of(decider), table),
        against(groups, key, BYTES),
    ]


@dataclass(frozen=True)
class Spent:
    """A cost against which the deciding metric is drawn."""

    name: str
    """Key of `UNITS`, and part of the figure's name."""
    series: str
    """Key of `RunData.totals`."""
    axis: str
    """What follows the unit on the axis."""
    words: str


BYTES = Spent("bytes", "bytes", "moved", "Bytes: downloads and uploads of all clients in training.")


def against(groups: Sequence[Group], key: str, spent: Spent) -> Figure:
    """Draw the deciding metric against a cost."""
    drawn, rows, decider = [], [], groups[0].decider
    ends = [total.value for group in groups if (total := group.over(last(summed(spent.series))))]
    scale, unit, units = unit_for(ends, UNITS[spent.name])
    for group in groups:
        cost = dict(group.curve(summed(spent.series)))
        points = [(t, cost[t].value / scale, one) for t, one in group.curve(measured(key)) if t in cost]
        drawn += traces(Curve.of(group, [(x, one) for _, x, one in points]), scale_of(decider), f"%{{x:.4g}} {unit}")
        shown = thin(points, max(5, MOST_ROWS // len(groups)))
        rows += [[group.label, f"{t:.0f}", f"{x:.4g}", one.text(decider.text)] for t, x, one in shown]
    name = f"{decider.name}-by-{spent.name.replace(' ', '-')}-{key}"
    title, axes = f"{decider.title} against {units}", (f"{unit} {spent.axis}", scale_of(decider).title)
    caption = f"{MEASURED[key].capitalize()}. {spent.words} Mean over seeds."
    table = Table(["run", "round", unit, decider.name], rows, f"{decider.title} by {units}" + thinned(rows))
    return figure(name, title, caption, drawn, axes, table, xaxis_rangemode="tozero")


def capacities(groups: Sequence[Group]) -> Section | None:
    """Return the deciding metric of the server's model by capacity, if there are several (FLANC, Figures 3 and 4)."""
    measured_at = [group for group in groups if group.runs[0].by_level]
    levels = sorted({float(level) for group in measured_at for level in group.runs[0].by_level})
    if len(levels) < 2:
        return None
    drawn, rows, folds, decider = [], [], list[Element](), groups[0].decider
    for group in measured_at:
        ends = {level: group.over(last(_at_level(f"{level:g}"))) for level in levels}
        curve = Curve.of(group, [(level, one) for level, one in ends.items() if one])
        drawn += traces(curve, scale_of(decider), "capacity %{x}")
        rows.append([group.label, *(written(one, decider.text) for one in ends.values())])
        if len(group.runs[0].by_level) > 1:
            folds.append(Fold(f"Over rounds: {group.label}", [_levels_over_rounds(group)]))
    title, axes = f"{decider.title} by capacity", ("capacity", scale_of(decider).title)
    caption = (
        "The server's model at each capacity, on the central test set, after the last measured round. A method that "
        "ignores capacities has one model."
    )
    table = Table(["run", *(f"{level:g}" for level in levels)], rows, f"Last {decider.name} by capacity")
    plot = figure(f"{decider.name}-by-capacity", title, caption, drawn, axes, table)
    return Section("capacity", title, [plot, *folds])


def _levels_over_rounds(group: Group) -> Figure:
    levels = sorted(group.runs[0].by_level, key=float, reverse=True)
    curves = [
        Curve(f"capacity {level}", group.curve(_at_level(level)), colour(place), dash(place))
        for place, level in enumerate(levels)
    ]
    decider = group.decider
    name, title = f"{decider.name}-by-capacity-{group.slug}", f"{group.label}: {decider.name} by capacity over rounds"
    caption = "The server's model on the central test set. Mean over seeds; bands are 95 % intervals."
    table = f"{decider.title} by round and capacity"
    return over_rounds(name, title, caption, curves, scale_of(decider), table, showlegend=True)


def _at_level(level: str) -> Series:
    return lambda run: run.by_level.get(level, [])
