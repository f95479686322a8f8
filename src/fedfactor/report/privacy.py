"""What runs with differential privacy have spent, on which tensors, and what that cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedfactor.report.curves import Spent, against
from fedfactor.report.elements import Element, Section, Table, Text
from fedfactor.report.groups import Group
from fedfactor.report.plots import Curve, Scale, over_rounds
from fedfactor.report.read import last, summed
from fedfactor.report.values import four_digits

EPSILON = Spent("epsilon", "epsilon", "spent", "Epsilon: spent on the updates of the rounds so far.")
SEEDS = {
    "secret": "a secret seed of the server",
    "run": "the run's seed, which the recipe tells: this is a simulation and protects nobody",
}


def privacy(groups: Sequence[Group], measure: str | None) -> Section | None:
    """Return epsilon over rounds, the deciding metric against epsilon, and how updates were protected."""
    private = [group for group in groups if any(run.privacy for run in group.runs)]
    if not private:
        return None
    head = [
        "run", "epsilon", "delta", "noise", "clip", "where", "cohorts", "numbers sent", "numbers kept private", "seed",
    ]  # fmt: skip
    rows = [_row(group) for group in private]
    table = Table(head, rows, "Differential privacy of whole clients. Noise: as a multiple of the clip, on the sum")
    elements: list[Element] = [table]
    if any(run.totals.get("epsilon") for group in private for run in group.runs):
        curves = [Curve.of(group, group.curve(summed("epsilon"))) for group in private]
        caption = "What the updates of all rounds so far spend together."
        scale = Scale("epsilon", least=0.0)
        elements.append(over_rounds("epsilon-by-round", "Epsilon against rounds", caption, curves, scale, "Epsilon"))
        if measure:
            elements.append(against(private, measure, EPSILON))
    words = (
        "Numbers that stay on a client are in no message, so they spend nothing. Epsilon covers the models that the "
        "server makes and sends. It does not cover this report: scores of clients, and who took part, have no noise."
    )
    return Section("privacy", "Privacy", [*elements, Text(words)])


def _row(group: Group) -> list[str]:
    run = next(run for run in group.runs if run.privacy)
    found: Mapping[str, Any] = run.privacy
    spent = group.over(last(summed("epsilon")))
    share = f"{found['cohort']} of {found['population']}"
    return [
        group.label,
        spent.text(four_digits) if spent else "infinite (no noise)" if run.last_round else "0",
        f"{found['delta']:g}",
        f"{found['noise']:g}",
        str(found["clip"]),
        found["where"],
        f"{found['sampling']}, {share}; hidden: {found['neighbours']}",
        f"{found['shared']:,}",
        f"{found['private']:,}",
        SEEDS[found["seed"]],
    ]
