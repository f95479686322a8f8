"""The sections without plots: failures, recovered pictures, how results were measured, and the recipes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedfactor.report.comparison import candidate_score, score_head, tuning_words
from fedfactor.report.elements import Code, Element, Fold, Pictures, Section, Table, Text
from fedfactor.report.groups import Group
from fedfactor.report.values import thin
from fedfactor.runs.tuning import FILE as TUNING_FILE
from fedfactor.runs.tuning import written as written_settings

MOST_REASONS = 20
MOST_FAILURES = 200
MOST_PICTURES = 100
ABOVE_BELOW = "Above: the client's own picture. Below: what was recovered."


def failures(groups: Sequence[Group]) -> Section:
    """Return which updates were not used, and why."""
    runs = [run for group in groups for run in group.runs if run.failures]
    if not runs:
        return Section("failures", "Failures", [Text("None: all sampled clients returned a valid update.")])
    counts = {run.name: Counter(reason for *_, reason in run.failures) for run in runs}
    reasons = [[run, why, str(n)] for run, found in counts.items() for why, n in found.most_common(MOST_REASONS)]
    rows = [[run.name, str(round), str(client), reason] for run in runs for round, client, reason in run.failures]
    more = f" (the first {MOST_FAILURES} of {len(rows)})" if len(rows) > MOST_FAILURES else ""
    each = Table(["run", "round", "client", "reason"], rows[:MOST_FAILURES], f"Updates that were not used{more}")
    why = Table(["run", "reason", "times"], reasons, "Reasons for failures")
    return Section("failures", "Failures", [why, Fold("All failures", [each])])


def audits(groups: Sequence[Group]) -> Section | None:
    """Return what `fedfactor audit` has recovered from the runs on which it was used."""
    elements: list[Element] = []
    for run in (run for group in groups for run in group.runs):
        for path in sorted(run.directory.glob("audit-*.json")):
            found = json.loads(path.read_text(encoding="utf-8"))
            elements.append(audit_table(found, f"{run.name}, {found['attack']['mode']}"))
            pairs = [pair for one in found["attacks"] for pair in picture_pairs(one)]
            shown = thin(pairs, MOST_PICTURES)
            of_all = f" ({len(shown)} of {len(pairs)}; all are in {path.stem}.html)" if len(shown) < len(pairs) else ""
            if shown:
                elements.append(Fold(f"{run.name}: pictures{of_all}", [Text(ABOVE_BELOW), Pictures(shown)]))
    return Section("audit", "Pictures recovered from uploads", elements) if elements else None


def audit_table(found: Mapping[str, Any], name: str) -> Table:
    """Return the figures of an audit, over all its rounds and by round. `found` is the content of its JSON file."""
    rows = {"all": found["psnr"], **{f"round {round}": one for round, one in found["rounds"].items()}}
    cells = [[row, *(f"{value:.2f}" for value in figures.values())] for row, figures in rows.items()]
    caption = f"{name}: PSNR in dB, higher is closer; flat is a picture of one colour"
    return Table(["", *(key.replace("_", " ") for key in found["psnr"])], cells, caption)


def picture_pairs(attack: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the original and the recovered pictures of one attack, with captions."""
    captions = [f"round {attack['round']}, client {attack['client']}: {value:.1f} dB" for value in attack["psnr"]]
    return list(zip(attack.get("originals", ()), attack.get("recovered", ()), captions, strict=False))


def tuning(groups: Sequence[Group]) -> Section | None:
    """Return the settings that `fedfactor compare --tune` has tried and chosen."""
    rows, words = [], dict[str, None]()
    for group in groups:
        path = next((path for run in group.runs if (path := run.directory / TUNING_FILE).exists()), None)
        if path is not None:
            found = json.loads(path.read_text(encoding="utf-8"))
            words[tuning_words(found)] = None
            for one in found["candidates"]:
                value = one["score"] if "score" in one else one["accuracy"]  # runs of earlier versions
                score = candidate_score(value, one["diverged"], group.decider)
                chosen = "yes" if one["settings"] == found["chosen"] else ""
                rows.append([group.label, written_settings(one["settings"]), score, chosen])
    if not rows:
        return None
    head = score_head(f"validation {groups[0].decider.name}", groups[0].decider)
    table = Table(["run", "candidate", head, "chosen"], rows, " ".join(words))
    return Section("tuning", "Tuning", [table])


def protocol(groups: Sequence[Group]) -> Section:
    """Return how results were measured: one row per figure, or several if runs differ."""
    runs = [(group, run) for group in groups for run in group.runs]
    said: dict[str, dict[str, list[str]]] = {}
    for group, run in runs:
        for key, value in run.protocol.items():
            same = len({str(one.protocol.get(key)) for one in group.runs}) == 1
            said.setdefault(key, {}).setdefault(str(value), []).append(group.label if same else run.name)
    rows = [
        [key.replace("_", " "), value, "all" if len(names) == len(runs) else ", ".join(dict.fromkeys(names))]
        for key, values in said.items()
        for value, names in values.items()
    ]
    table = Table(["figure", "meaning", "runs"], rows, "What the figures mean")
    return Section("protocol", "How results were measured", [table])


def recipes(groups: Sequence[Group]) -> Section:
    """Return the resolved recipe of each run."""
    runs = [(f"{group.label}: {run.name}", run) for group in groups for run in group.runs]
    folds = [Fold(title, [Code(run.recipe, f"recipe of {run.name}")]) for title, run in runs]
    return Section("recipes", "Recipes", folds)
