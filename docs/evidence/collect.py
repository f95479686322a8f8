"""Collect run directories into one record: `python docs/evidence/collect.py RECORD.json RUN ...`, then its table.

A record has what a run measured and what identifies it, and no weights. Runs of one cell of a recipe are put together:
they should differ in their seed only.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

KEPT = ("rounds", "bytes_up", "bytes_down", "seconds", "failures", "weights_sha256", "private_sha256", "versions")


def record(directory: Path) -> dict[str, Any]:
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
    attacked = [json.loads(path.read_text()) for path in sorted(directory.glob("audit-*.json"))]
    audits = [{key: audit[key] for key in ("attack", "psnr", "rounds")} for audit in attacked]  # without pictures
    return {
        "cell": re.sub(r"-seed=\d+$", "", directory.name),
        "seed": recipe["train"]["seed"],
        "dynamic": recipe["capacities"]["dynamic"],
        "accuracy": found,
        **{key: summary[key] for key in KEPT if key in summary},
        **({"audits": audits} if audits else {}),
        "recipe": recipe,
    }


def table(records: list[dict[str, Any]]) -> str:
    """Write the last accuracies of every cell, mean and spread (half the range) over its seeds, in per cent."""
    cells: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for item in records:
        last = {level: curve[max(curve, key=int)] for level, curve in item["accuracy"]["global"].items()}
        if item["accuracy"]["clients"]:
            last["clients"] = item["accuracy"]["clients"][max(item["accuracy"]["clients"], key=int)]
        method = item["recipe"]["method"]["name"]
        label = item["cell"] if method in item["cell"] else f"{item['cell']} ({method})"
        label += ", redrawn" if item["dynamic"] else ""
        cells[(item["recipe"]["name"], label)].append(last)
    lines = ["| cell | seeds | accuracy |", "|---|---|---|"]
    for (_, cell), runs in cells.items():
        words = []
        levels = {level for run in runs for level in run}
        for level in sorted(levels, key=lambda word: (word == "clients", word)):
            values = [100 * run[level] for run in runs if level in run]
            mean, spread = sum(values) / len(values), (max(values) - min(values)) / 2
            words.append(f"{level}: {mean:.1f} ± {spread:.1f}")
        lines.append(f"| {cell} | {len(runs)} | {', '.join(words)} |")
    return "\n".join(lines)


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
    """Write the record and print its tables."""
    target, *directories = map(Path, sys.argv[1:])
    records = json.loads(json.dumps([record(directory) for directory in directories]))
    target.write_text(json.dumps(records, indent=1) + "\n")
    print(table(records))
    if any("audits" in item for item in records):
        print(audit_table(records))


if __name__ == "__main__":
    main()
