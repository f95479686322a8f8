"""The card of an exported model: what it is, its data, its metrics and its cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import fedfactor
from fedfactor.data.batches import outline
from fedfactor.export.formats import Format
from fedfactor.export.taking import Taken
from fedfactor.registry import entries
from fedfactor.runs.recipe import Recipe
from fedfactor.server.events import decider_of
from fedfactor.task.metrics import WITH_CLASSES


def card_text(taken: Taken, path: Path, snippet: str, form: Format, code: Path | None, apart: float) -> str:
    """Write the card in Markdown."""
    run, result, facts = taken.run, taken.result, taken.facts
    recipe, method = run.recipe, result.federation.setup.at(result.server.round).method
    known = entries("methods").get(recipe.method.name)
    paper = known.paper if known else ""
    totals = result.server.totals
    whose = f"the model of client {taken.client}" if taken.client is not None else "the server's model"
    settings = ", ".join(f"{key} = {value!r}" for key, value in recipe.tables["method"].items() if key != "name")
    count = sum(tensor.numel() for tensor in taken.model.parameters())
    measured, base = _journal(taken), result.federation.setup.base_sha256
    lines = [
        f"# {path.name}",
        "",
        f"{whose[0].upper()}{whose[1:]} of the run `{recipe.tables['name']}` after {result.server.round} of "
        f"{recipe.rounds.rounds} rounds" + (f", at capacity {taken.capacity:g}" if method.traits.adapts else "") + ".",
        "",
        "```python",
        snippet.rstrip(),
        "```",
        "",
        f"Needs: `pip install {form.needs}`" + (f", and [{code.name}]({code.name}) beside it." if code else "."),
        "",
        "| | |",
        "|---|---|",
        f"| network | `{run.model_name}`, {count:,} parameters, ordinary layers |",
        f"| input | {_input(taken)} |",
        *([f"| frozen base | SHA-256 `{base}` |"] if base else []),
        f"| output | {_output(facts)} |",
        f"| data | {_data(recipe, facts['clients'])} |",
        f"| method | `{recipe.method.name}`{f' ({paper})' if paper else ''}{f': {settings}' if settings else ''} |",
        f"| optimizer, codec | `{recipe.optimizer.name}`, `{recipe.codec.name}` |",
        *_scores(taken),
        *([f"| {decider_of(run.metrics).name} in the run | {measured} |"] if measured else []),
        *(_costs(totals) if totals else []),  # a client's device does not know them
        *([f"| norm statistics | {taken.norms} |"] if taken.norms else []),
        f"| checked | on {taken.batch_of}: outputs differ by {taken.difference:.1e} of the largest one from those of "
        f"the trained network, and by {apart:.1e} after reading the file back |",
        f"| made by | fedfactor {fedfactor.__version__}, torch {torch.__version__} |",
        "",
        "The recipe, with all defaults:",
        "",
        "```toml",
        recipe.to_toml().rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _costs(totals: Mapping[str, Any]) -> list[str]:
    return [
        f"| bytes | {totals['bytes_down']:,} down, {totals['bytes_up']:,} up, over all clients and rounds |",
        *([] if totals["macs"] is None else [f"| multiply-accumulates | {totals['macs']:.4g} forward, in training |"]),
    ]


def _data(recipe: Recipe, clients: int) -> str:
    if recipe.from_python:
        return f"given in Python, over {clients} clients"
    tables = recipe.tables
    return f"`{tables['data']['name']}` over {clients} clients, partition `{tables['partition']['kind']}`"


def _input(taken: Taken) -> str:
    batch, facts = taken.batch, taken.facts
    if not isinstance(batch, torch.Tensor):
        return f"what the data set returns: `{json.dumps(outline(batch))}`"
    kind, shape = str(batch.dtype).removeprefix("torch."), ", ".join(map(str, batch.shape[1:]))
    return f"(batch, {shape}) of {kind}: `{facts['transform']}`, where x is {facts['input_dtype']} as in the data set"


def _output(facts: dict[str, Any]) -> str:
    if facts["kind"] == "binary":
        return "(batch, 1) logits; above 0 means yes"
    if facts["kind"] not in WITH_CLASSES:
        return "numbers, one per target" if facts["kind"] == "regression" else "as the task's own loss takes it"
    names = [str(name) for name in facts["class_names"]]
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"(batch, {facts['classes']}) logits: {listed}".replace("|", "\\|").replace("\n", " ")


def _scores(taken: Taken) -> list[str]:
    """Return one line per metric."""
    if not taken.scores:
        events = taken.run.metrics  # a client's device has none
        decider = decider_of(events) if events else taken.result.federation.setup.task.decider
        return [f"| {decider.name} | not measured |"]
    on = f"on {taken.scores['examples']:.0f} {taken.tested}"
    return [f"| {name} | {score:.4f} {on} |" for name, score in shown(taken.scores).items()]


def shown(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics to show: the loss only if there are no others."""
    others = {name: score for name, score in scores.items() if name not in ("loss", "examples")}
    return others or {name: score for name, score in scores.items() if name == "loss"}


def _journal(taken: Taken) -> str:
    """Return the last score that the run itself measured for this model."""
    name = decider_of(taken.run.metrics).name
    for event in reversed(taken.run.metrics):
        key = f"{taken.capacity:g}"
        if taken.client is None and key in event.get("global", {}):
            return f"{event['global'][key][name]:.4f} in round {event['round']}, on the central test set"
        for measured, when in OWN.items():
            scores = event.get(measured, {})
            if taken.client is not None and taken.client in scores.get("who", []):
                own = scores["each"][scores["who"].index(taken.client)]
                return f"{own:.4f} in round {event['round']}, {when}"
    return ""


OWN = {"all": "on its own test data", "selected_after": "on its own test data, directly after it had trained"}
"""Measurements of a client's own model."""
