"""What an accuracy took: rounds, bytes, operations, time on slow links, energy (FedPara, Figure 3, Tables 7, 8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedfactor.report.curves import summed
from fedfactor.report.groups import Group, Mean
from fedfactor.report.parts import (
    BYTES,
    TIMES,
    Figure,
    Piece,
    Section,
    Table,
    Text,
    amount,
    at_or_before,
    axes,
    bars,
    percent,
    sentence,
    span,
    unit_for,
)  # fmt: skip
from fedfactor.report.read import MEASURED, RunData

LINKS = ("2 Mbps", "10 Mbps", "50 Mbps")


def target_of(groups: Sequence[Group], measure: str, given: float | None) -> tuple[float, str] | None:
    """Return the accuracy to be reached, and where it comes from."""
    if given is not None:
        return given, "as asked for"
    wanted = [run.tables.get("evaluate", {}).get("target") for group in groups for run in group.runs]
    if wanted and wanted[0] is not None and len(set(wanted)) == 1:
        return float(wanted[0]), "the recipe's target"
    bests = [max((value for _, value in run.accuracy.get(measure, [])), default=None) for g in groups for run in g.runs]
    reached = [value for value in bests if value is not None]
    return (min(reached), "the highest that every run reaches") if reached else None


def reached(run: RunData, measure: str, target: float) -> int | None:
    """Return the first measured round that is at least as good as the target."""
    return next((round for round, value in run.accuracy.get(measure, []) if value >= target), None)


def costs(groups: Sequence[Group], measure: str | None, given: float | None, joules_per_byte: float | None) -> Section:
    """Return what reaching the target took."""
    chosen = target_of(groups, measure, given) if measure else None
    if measure is None or chosen is None:
        return Section("cost", "Cost of an accuracy", [Text("No run has measured an accuracy yet.")])
    target, why = chosen
    figures = _figures(measure, target, joules_per_byte)
    table = {group.number: {name: group.over(figure) for name, (figure, _) in figures.items()} for group in groups}
    if not any(one["energy"] for one in table.values()):
        figures.pop("energy")
    rows = []
    for group in groups:
        count = sum(reached(run, measure, target) is not None for run in group.runs)
        cells = [_text(table[group.number][name], form) for name, (_, form) in figures.items()]
        rows.append([group.label, f"{count} of {len(group.runs)}", *cells])
    head = ["run", "reached by", *figures]
    words = (
        f"The target is an accuracy of {percent(target)}, {why}; measured: {MEASURED[measure]}. Figures are of the "
        "first measured round that reaches it, means over the seeds that do. Times are those of rounds at a link's "
        "speed: seconds of the slowest client's work plus bytes a client over speed (FedPara, D.1)."
    )
    pieces: list[Piece] = [Text(words), Table(head, rows, f"Cost of reaching {percent(target)}")]
    if "energy" not in figures:
        pieces.append(
            Text(
                "Energy of the link goes with its bytes (FedPara, Figure 3g): runs compare by it as they do by bytes. "
                "In joules it stands here if the recipe or the command says what a byte costs on your link "
                "(evaluate.joules_per_byte, --joules-per-byte); no paper prints a figure for that."
            )
        )
    pieces += _pictures(groups, table, figures, target)
    pieces.append(_a_round(groups, joules_per_byte))
    return Section("cost", "Cost of an accuracy", pieces)


Measure = tuple[Callable[[RunData], float | None], Callable[[float], str]]


def _figures(measure: str, target: float, joules_per_byte: float | None) -> dict[str, Measure]:
    def at_target(key: str, factor: float = 1.0) -> Callable[[RunData], float | None]:
        def find(run: RunData) -> float | None:
            round = reached(run, measure, target)
            value = None if round is None else at_or_before(summed(key)(run), round)
            return None if value is None else factor * value

        return find

    def rounds(run: RunData) -> float | None:
        return reached(run, measure, target)

    energy = at_target("joules") if joules_per_byte is None else at_target("bytes", joules_per_byte)
    return {
        "rounds": (rounds, lambda x: f"{x:.3g}"),
        "bytes": (at_target("bytes"), lambda x: amount(x, "B")),
        "MACs": (at_target("macs"), amount),
        **{f"time at {link}": (at_target(link), span) for link in LINKS},
        "energy": (energy, lambda x: amount(x, "J")),
    }


def _pictures(
    groups: Sequence[Group], table: dict[int, dict[str, Mean | None]], figures: dict[str, Measure], target: float
) -> list[Piece]:
    caption = f"To reach {percent(target)}; whiskers are the 95 % interval of the mean over seeds."
    pieces: list[Piece] = []

    def means(*names: str) -> list[float]:
        return [one.value for found in table.values() for name in names if (one := found[name])]

    scale, unit, units = unit_for(means("bytes"), BYTES)
    bytes_ = [bars(group, [group.label], [table[group.number]["bytes"]], scale=1 / scale) for group in groups]
    form = figures["bytes"][1]
    rows = [[group.label, _text(table[group.number]["bytes"], form)] for group in groups]
    behind = Table(["run", "bytes"], rows, "Bytes to the target")
    title = f"{sentence(units)} to the target"
    pieces.append(Figure("target-bytes", title, caption, bytes_, axes("", unit, x_showgrid=False), behind))
    names = [f"time at {link}" for link in LINKS]
    scale, unit, units = unit_for(means(*names), TIMES)
    times = [bars(group, LINKS, [table[group.number][name] for name in names], scale=1 / scale) for group in groups]
    rows = [[group.label, *(_text(table[group.number][name], span) for name in names)] for group in groups]
    behind = Table(["run", *LINKS], rows, "Time to the target by speed of the link")
    title = f"{sentence(units)} to the target"
    pieces.append(Figure("target-time", title, caption, times, axes("link", unit, x_showgrid=False), behind))
    if "energy" in figures:
        energy = [bars(group, [group.label], [table[group.number]["energy"]]) for group in groups]
        rows = [[group.label, _text(table[group.number]["energy"], figures["energy"][1])] for group in groups]
        behind = Table(["run", "energy"], rows, "Energy of the link to the target")
        layout = axes("", "joules", x_showgrid=False)
        pieces.append(Figure("target-energy", "Energy to the target", caption, energy, layout, behind))
    return pieces


def _a_round(groups: Sequence[Group], joules_per_byte: float | None) -> Table:
    """Return what one round costs: FedPara's Table 7."""

    def mean_of(key: str, factor: float = 1.0) -> Callable[[RunData], float | None]:
        return lambda run: factor * series[-1][1] / len(series) if (series := summed(key)(run)) else None

    energy = mean_of("joules") if joules_per_byte is None else mean_of("bytes", joules_per_byte)
    forms: dict[str, Measure] = {
        "bytes": (mean_of("bytes"), lambda x: amount(x, "B")),
        "MACs": (mean_of("macs"), amount),
        **{f"time at {link}": (mean_of(link), span) for link in LINKS},
        "time of the simulation": (mean_of("seconds"), span),
        "energy": (energy, lambda x: amount(x, "J")),
    }
    if not any(group.over(energy) for group in groups):
        forms.pop("energy")
    rows = [
        [group.label, *(_text(group.over(figure), form, "-") for figure, form in forms.values())] for group in groups
    ]
    return Table(["run", *forms], rows, "One round, on average: bytes and MACs of all its clients, time as above")


def _text(one: Mean | None, form: Callable[[float], str], missing: str = "not reached") -> str:
    return missing if one is None else one.text(form)
