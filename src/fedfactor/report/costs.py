"""The cost of a target: rounds, bytes, operations, time on slow links, energy (FedPara, Figure 3, Tables 7, 8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedfactor.report.elements import Element, Section, Table, Text
from fedfactor.report.groups import Group, Mean, written
from fedfactor.report.plots import bars, figure
from fedfactor.report.read import MEASURED, Point, RunData, best, measured, summed
from fedfactor.report.values import UNITS, Format, amount, joules, size, span, unit_for

LINKS = {f"time at {speed}": speed for speed in ("2 Mbps", "10 Mbps", "50 Mbps")}
CHARTS = {
    "bytes": ({"bytes": ""}, "Bytes to the target"),
    "time": (LINKS, "Time to the target by speed of the link"),
    "simulated time": ({"simulated time": ""}, "Simulated time to the target"),
    "energy": ({"energy": ""}, "Energy to the target"),
}
"""By quantity: the costs shown, each with the label of its bars ("": the group's), and the caption of the table."""
NOT_REACHED = "not reached"


@dataclass(frozen=True)
class Price:
    """A cost of training: its key in `RunData.totals`, its format, and a factor to multiply it by."""

    key: str
    text: Format
    factor: float = 1.0

    def mean(self, group: Group, reduce: Callable[[RunData, Sequence[Point]], float | None]) -> Mean | None:
        """Average over the runs of a group what `reduce` makes of each run's series."""

        def figure(run: RunData) -> float | None:
            value = reduce(run, summed(self.key)(run))
            return None if value is None else self.factor * value

        return group.over(figure)


def target_of(groups: Sequence[Group], measure: str, given: float | None) -> tuple[float, str] | None:
    """Return the target of the deciding metric and where it comes from. Return None if no run has measured it."""
    if given is not None:
        return given, "as requested"
    runs = [run for group in groups for run in group.runs]
    wanted = {run.tables.get("evaluate", {}).get("target") for run in runs}
    if len(wanted) == 1 and (target := wanted.pop()) is not None:
        return float(target), "the recipe's target"
    bests, decider = [x for run in runs if (x := best(measured(measure))(run)) is not None], groups[0].decider
    if not bests:
        return None
    return min(bests, key=decider.goodness), f"the {decider.best} {decider.name} that every run reaches"


def costs(groups: Sequence[Group], measure: str | None, given: float | None, joules_per_byte: float | None) -> Section:
    """Return what it cost to reach the target, and what one round costs."""
    decider = groups[0].decider
    chosen = target_of(groups, measure, given) if measure else None
    if measure is None or chosen is None:
        return Section("cost", "Cost of reaching a target", [Text(f"No run has measured its {decider.name} yet.")])
    (target, source), goodness = chosen, decider.goodness

    def reached(run: RunData) -> int | None:
        return next((round for round, value in measured(measure)(run) if goodness(value) >= goodness(target)), None)

    def at_target(run: RunData, series: Sequence[Point]) -> float | None:
        end = reached(run)
        return None if end is None else next((value for round, value in reversed(series) if round <= end), None)

    def per_round(run: RunData, series: Sequence[Point]) -> float | None:
        return series[-1][1] / len(series) if series else None

    labels = {"run": [group.label for group in groups]}
    kinds = _kinds(groups, joules_per_byte)
    means = {name: [cost.mean(group, at_target) for group in groups] for name, cost in kinds.items()}
    cells = {name: [written(one, kinds[name].text, NOT_REACHED) for one in found] for name, found in means.items()}
    rounds = {
        "reached by": [f"{sum(map(bool, map(reached, group.runs)))} of {len(group.runs)}" for group in groups],
        "rounds": [written(group.over(reached), lambda x: f"{x:.3g}", NOT_REACHED) for group in groups],
    }
    words = (
        f"The target is {decider.name} {decider.text(target)}, {source}; measured: {MEASURED[measure]}. Costs are "
        "those up to the first measured round that reaches the target, averaged over the seeds that reach it. The time "
        "at a link's speed is computed: in each round, the slowest client's work plus the bytes per client divided by "
        "the speed (FedPara, D.1). Simulated time and energy are those of the fleet's devices, if the runs have a "
        "fleet."
    )
    elements: list[Element] = [Text(words), _table(labels | rounds | cells, f"Cost of reaching {decider.text(target)}")]
    if "energy" not in kinds:
        words = (
            "The energy of the link is proportional to its bytes (FedPara, Figure 3g), so runs compare by energy as "
            "they do by bytes. To see joules, give the energy per byte of your link as evaluate.joules_per_byte in the "
            "recipe or as --joules-per-byte. The papers print no value for it."
        )
        elements.append(Text(words))
    caption = f"To reach {decider.text(target)}; whiskers are 95 % intervals of the mean over seeds."
    for quantity, (shown, behind) in CHARTS.items():
        if shown.keys() <= kinds.keys():
            scale, unit, units = unit_for((one.value for name in shown for one in means[name] if one), UNITS[quantity])
            drawn = [
                bars(
                    group,
                    [bar or group.label for bar in shown.values()],
                    [means[name][place] for name in shown],
                    1 / scale,
                )
                for place, group in enumerate(groups)
            ]
            table = _table(labels | {name: cells[name] for name in shown}, behind)
            title, axes = f"{units.capitalize()} to the target", ("", unit)
            name = f"{quantity.replace(' ', '-')}-to-target"
            elements.append(figure(name, title, caption, drawn, axes, table, xaxis_showgrid=False))
    # FedPara's Table 7.
    cells = {name: [written(cost.mean(one, per_round), cost.text) for one in groups] for name, cost in kinds.items()}
    words = "One round, on average: bytes and MACs of all its clients, times as above"
    return Section("cost", "Cost of reaching a target", [*elements, _table(labels | cells, words)])


def _kinds(groups: Sequence[Group], joules_per_byte: float | None) -> dict[str, Price]:
    """Return all costs by name. Energy is among them if the energy per byte is given, here or in a recipe."""
    found = {"bytes": Price("bytes", size)}
    if any(summed("macs")(run) for group in groups for run in group.runs):  # operations may not be countable
        found["MACs"] = Price("macs", amount)
    found |= {name: Price(speed, span) for name, speed in LINKS.items()}
    found["time of the simulation"] = Price("seconds", span)
    runs = [run for group in groups for run in group.runs]
    if any(summed("simulated_seconds")(run) for run in runs):
        found["simulated time"] = Price("simulated_seconds", span)
    if joules_per_byte is not None:
        found["energy"] = Price("bytes", joules, joules_per_byte)
    elif any(summed("simulated_joules")(run) for run in runs):  # computation and link
        found["energy"] = Price("simulated_joules", joules)
    elif any(summed("joules")(run) for run in runs):
        found["energy"] = Price("joules", joules)
    return found


def _table(columns: Mapping[str, Sequence[str]], caption: str) -> Table:
    return Table(list(columns), list(zip(*columns.values(), strict=True)), caption)
