"""Collect run directories into one record, print its tables, and plot it.

    python docs/evidence/collect.py RECORD.json --commit COMMIT RUN ... [--against L] [--plot F.svg] [--time | --bytes]

A record has what a run measured and what identifies it, and no weights. Runs with one label (a cell of a recipe, or a
method of a comparison) are put together: they should differ in their seed only. `--against` prints how far each label
is ahead of one of them. Runs of one seed have the same split and cohorts, so differences are taken seed by seed.
`--time` prints the times of runs on a fleet, and plots accuracies over simulated time; `--bytes` plots them over bytes.
Without RUN, the tables and the plot are those of an existing record.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

from fedfactor.report.groups import Mean, mean

KEPT = ("rounds", "bytes_up", "bytes_down", "seconds", "failures", "weights_sha256", "private_sha256", "versions")
SECONDS, MOVED = "simulated seconds", "MB moved"
"""Axes of plots, beside rounds."""


def record(directory: Path, commit: str) -> dict[str, Any]:
    """Reduce a run directory to what is worth keeping."""
    recipe = tomllib.loads((directory / "recipe.toml").read_text())
    summary = json.loads((directory / "summary.json").read_text())
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    measured = [event for event in events if {"global", "all"} & event.keys()]
    found: dict[str, Any] = {"global": {}, "clients": {}}
    for event in measured:
        for level, scores in event.get("global", {}).items():
            found["global"].setdefault(level, {})[event["round"]] = scores["accuracy"]
        if "all" in event:
            found["clients"][event["round"]] = event["all"]["accuracy"]
            found["each"] = event["all"]["each"]  # of the last round that was measured
    clock = {event["round"]: event["totals"]["simulated_seconds"] for event in measured if "clock" in event}
    attacked = [json.loads(path.read_text()) for path in sorted(directory.glob("audit-*.json"))]
    audits = [{key: audit[key] for key in ("attack", "psnr", "rounds")} for audit in attacked]  # without pictures
    tuning = directory / "tuning.json"
    compared = re.fullmatch(r"seed-\d+", directory.name)
    return {
        "cell": directory.parent.name if compared else re.sub(r"-seed=\d+$", "", directory.name),
        "commit": commit,
        **({"tuning": json.loads(tuning.read_text())} if tuning.exists() else {}),
        "seed": recipe["train"]["seed"],
        "dynamic": recipe["capacities"]["dynamic"],
        "accuracy": found,
        **({"clock": clock} if clock else {}),
        **{key: summary[key] for key in KEPT if key in summary},
        **({"audits": audits} if audits else {}),
        "recipe": recipe,
    }


def last(item: dict[str, Any]) -> dict[str, float]:
    """Return the last accuracies of a run in per cent, by capacity; `clients` is the mean over clients' own tests."""
    curves = {**item["accuracy"]["global"], **({"clients": found} if (found := item["accuracy"]["clients"]) else {})}
    return {level: 100 * curve[max(curve, key=int)] for level, curve in curves.items()}


def labelled(records: list[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the runs by label and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for item in records:
        method = item["recipe"]["method"]["name"]
        label = item["cell"] if method in item["cell"] else f"{item['cell']} ({method})"
        found[label + (", redrawn" if item["dynamic"] else "")][item["seed"]] = item
    return found


def written(figure: Mean) -> str:
    """Write a mean with half its 95 % interval."""
    return f"{figure.value:.1f}" + (f" ± {figure.half:.1f}" if figure.half is not None else "")


def table(records: list[dict[str, Any]]) -> str:
    """Write the last accuracies of every label in per cent: the mean over its seeds ± half the 95 % interval."""
    runs = labelled(records)
    levels = sorted({level for item in records for level in last(item)}, key=lambda word: (word == "clients", word))
    lines = ["| label | seeds | chosen | " + " | ".join(levels) + " | MB | minutes |", "|---" * (len(levels) + 5) + "|"]
    for label, seeds in runs.items():
        cells = []
        for level in levels:
            values = [last(item)[level] for item in seeds.values() if level in last(item)]
            cells.append(written(mean(values)) if values else "")
        some = next(iter(seeds.values()))
        chosen = ", ".join(f"{key}={value}" for key, value in (some.get("tuning", {}).get("chosen") or {}).items())
        moved = mean([item["bytes_up"] + item["bytes_down"] for item in seeds.values()]).value / 1e6
        minutes = mean([item["seconds"] for item in seeds.values()]).value / 60
        row = [label, str(len(seeds)), chosen, *cells, f"{moved:.0f}", f"{minutes:.0f}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def differences(records: list[dict[str, Any]], against: str) -> str:
    """Write how far each label is ahead of one of them, seed by seed, and whether the 95 % interval excludes zero."""
    runs = labelled(records)
    if against not in runs:
        raise SystemExit(f"there is no label {against!r}; there are {', '.join(runs)}")
    lines = [f"| label | capacity | ahead of {against} by | verdict |", "|---|---|---|---|"]
    for label, seeds in runs.items():
        common = sorted(seeds.keys() & runs[against].keys())
        for level in last(next(iter(seeds.values()))) if label != against else ():
            pairs = [(last(seeds[seed]), last(runs[against][seed])) for seed in common]
            gaps = [ours[level] - theirs[level] for ours, theirs in pairs if level in ours and level in theirs]
            if gaps:
                gap = mean(gaps)
                known = gap.half is not None and abs(gap.value) > gap.half
                verdict = ("ahead" if gap.value > 0 else "behind") if known else "undecided"
                lines.append(f"| {label} | {level} | {written(gap)} | {verdict} |")
    return "\n".join(lines)


def times(records: list[dict[str, Any]], against: str = "") -> str:
    """Write simulated times: of a round, of the run, until `evaluate.target`, and how much sooner than one label."""
    names = ["label", "seeds", "seconds per round", "seconds in all", "seconds to the target", f"sooner than {against}"]
    names += ["MB", "dropped per round"]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    runs = labelled(records)
    for label, seeds in runs.items():
        some = list(seeds.values())
        whole = [item["clock"][str(item["rounds"])] for item in some]
        each = mean([seconds / item["rounds"] for seconds, item in zip(whole, some, strict=True)]).value
        found = {seed: seconds for seed, item in seeds.items() if (seconds := reached(item)) is not None}
        others = {seed: reached(item) for seed, item in runs.get(against, {}).items()}
        gains = [math.log(other / found[seed]) for seed, other in others.items() if other and seed in found]
        all_there = len(found) == len(seeds)
        row = [
            label, str(len(seeds)), f"{each:.2f}", written(mean(whole)),
            written(mean(list(found.values()))) if all_there else f"{len(found)} of {len(seeds)} reach it",
            factor(mean(gains)) if all_there and gains and label != against else "",
            f"{mean([item['bytes_up'] + item['bytes_down'] for item in some]).value / 1e6:.0f}",
            f"{mean([item['failures'] / item['rounds'] for item in some]).value:.1f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def factor(logarithm: Mean) -> str:
    """Write a geometric mean of ratios with its 95 % interval, given the mean of their logarithms."""
    middle, half = logarithm.value, logarithm.half
    ends = "" if half is None else f" ({math.exp(middle - half):.3g} to {math.exp(middle + half):.3g})"
    return f"{math.exp(middle):.1f} x{ends}"


def reached(item: dict[str, Any]) -> float | None:
    """Return the simulated seconds of the first measurement at which a run has its target, if it has."""
    curve, target = largest(item), item["recipe"]["evaluate"]["target"]
    there = [item["clock"][at] for at in sorted(curve, key=int) if curve[at] >= target]
    return there[0] if there else None


def largest(item: dict[str, Any]) -> dict[str, float]:
    """Return the accuracies of a run by round: of clients' own models, or of the server's at its largest capacity."""
    measured = item["accuracy"]
    found: dict[str, float] = measured["clients"] or measured["global"][max(measured["global"], key=float)]
    return found


def plot(records: list[dict[str, Any]], path: Path, over: str = "round") -> None:
    """Draw the mean accuracy of every label, at its largest capacity, over rounds, simulated seconds or MB moved."""
    from matplotlib.figure import Figure

    figure = Figure((6.4, 4.0), layout="constrained")
    axes = figure.add_subplot(xlabel=over, ylabel="accuracy in %", xscale="log" if over == MOVED else "linear")
    for label, seeds in labelled(records).items():
        curves = [largest(item) for item in seeds.values()]
        rounds = sorted(set.intersection(*(set(map(int, curve)) for curve in curves)))
        values = [[100 * curve[str(round)] for curve in curves] for round in rounds]
        places = [mean([place(item, round, over) for item in seeds.values()]).value for round in rounds]
        (line,) = axes.plot(
            places, [mean(some).value for some in values], marker="." if len(rounds) < 5 else "", label=label
        )
        axes.fill_between(places, list(map(min, values)), list(map(max, values)), color=line.get_color(), alpha=0.15)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})


def place(item: dict[str, Any], round: int, over: str) -> float:
    """Return where a round of a run is on the axis of a plot."""
    if over == SECONDS:
        return float(item["clock"][str(round)])
    return (item["bytes_up"] + item["bytes_down"]) / 1e6 * round / item["rounds"] if over == MOVED else round


def audit_table(records: list[dict[str, Any]]) -> str:
    """Write what attacks recovered, by method: PSNR in dB, mean and spread (half the range) over the runs."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for item in records:
        for audit in item.get("audits", []):
            found[f"{item['recipe']['method']['name']}, {audit['attack']['mode']}"].append(audit["psnr"])
    lines = ["| attacked | runs | average | maximum | flat | better than flat |", "|---|---|---|---|---|---|"]
    for name, figures in found.items():
        words = []
        for key in ("average", "maximum", "flat_average", "better_than_flat"):
            values = [one[key] for one in figures]
            words.append(f"{sum(values) / len(values):.2f} ± {(max(values) - min(values)) / 2:.2f}")
        lines.append(f"| {name} | {len(figures)} | {' | '.join(words)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the record, print its tables, and draw its plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--commit", default="", help="the commit that ran them")
    parser.add_argument("--against", default="", help="a label to compare the others with")
    parser.add_argument("--plot", type=Path, help="an SVG file")
    axis = parser.add_mutually_exclusive_group()
    axis.add_argument("--time", action="store_true", help="of runs on a fleet")
    axis.add_argument("--bytes", action="store_true", help="plot over bytes instead of rounds")
    given = parser.parse_intermixed_args()
    if given.runs:
        if not given.commit:
            parser.error("--commit says which commit ran them")
        records = [record(directory, given.commit) for directory in given.runs]
        given.record.write_text(json.dumps(records, indent=1) + "\n")
    records = json.loads(given.record.read_text())
    print(table(records))
    if given.against:
        print(differences(records, given.against))
    if given.time:
        print(times(records, given.against))
    if any("audits" in item for item in records):
        print(audit_table(records))
    if given.plot:
        plot(records, given.plot, SECONDS if given.time else MOVED if given.bytes else "round")


if __name__ == "__main__":
    main()
