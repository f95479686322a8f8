"""Advice as tables for a terminal, as plain data, as a sentence and as a recipe."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import tomli_w
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedfactor.advise.devices import WORDS, Device, PlanError, amount, quantity
from fedfactor.advise.fitting import Advice, DevicePlan, Fit
from fedfactor.runs import recipe
from fedfactor.runs.text import SPARE, plain


def sentence(found: Advice) -> str:
    """Return the choice and its reason in words."""
    request, fit = found.request, found.choice
    kind = "personal models" if request.personal else "a global model"
    if fit is None:
        return (
            f"No federated method with {kind} fits all devices: raise a limit, try a smaller batch (--set "
            "train.batch_size=8) or smaller capacities (--capacities), or choose a smaller model."
        )
    sizes = ", ".join(dict.fromkeys(_what(fit, row) for row in fit.rows))
    rivals = sum(other.suits(request) for other in found.fits) - 1
    if fit.method.name == "fedavg":
        return "Use fedavg: all devices can train the full dense model."
    among = f"the largest share among the {rivals + 1} methods with {kind} that fit all devices"
    among = among if rivals else f"and this is the only method with {kind} that fits all devices"
    stopped = dict.fromkeys(word for row in fit.rows for word in row.stopped_by)
    bound = f"; a larger size is limited by {' and '.join(NAMES[word] for word in stopped)}" if stopped else ""
    saved = min(row.bytes_ratio for row in fit.rows), max(row.bytes_ratio for row in fit.rows)
    times = f"{saved[0]:.3g}" if f"{saved[0]:.3g}" == f"{saved[1]:.3g}" else f"{saved[0]:.3g} to {saved[1]:.3g}"
    work = f"Its clients compute {100 * fit.share:.3g} % of the dense model on average"
    work = "Operations are not known" if math.isnan(fit.share) else f"{work}, {among}"
    return f"Use {fit.method.name} ({sizes}). {work}; dense FedAvg sends {times} times the bytes{bound}."


NAMES = {
    "up": "the upload", "down": "the download", "memory": "memory", "macs": "operations", "seconds": "time",
    "joules": "energy",
}  # fmt: skip


def _what(fit: Fit, row: DevicePlan) -> str:
    return f"{row.device} at {row.capacity:g}" if fit.method.traits.adapts else _setting(row) or "one size for all"


def _setting(row: DevicePlan) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in row.settings.items())


def render(found: Advice, rounds: int | None = None) -> RenderableType:
    """Return one table per device, the methods that do not fit, and the choice, for a terminal."""
    request, parts = found.request, list[RenderableType]()
    training = request.resolved.training
    dense = found.dense
    parts.append(
        Text(
            f"{request.tables['model']['name']}, inputs of shape {' x '.join(map(str, request.shape))}, dense: "
            f"{dense.parameters:,} parameters, {quantity('macs', dense.macs)} per example, "
            f"{quantity('memory', dense.memory)} to train a batch of {training.batch_size} "
            f"(activations: {quantity('memory', dense.activations)}), {quantity('up', dense.up)} up and "
            f"{quantity('down', dense.down)} down per round."
        )
    )
    columns = _columns(found, rounds)
    for place, device in enumerate(request.devices):
        table = Table(title=escape(_described(device)), **SPARE)
        for name in columns:
            words = name in ("method", "size", "limit")
            table.add_column(name, justify="left" if words else "right", no_wrap=name != "limit", min_width=5)
        for fit in found.fits:
            table.add_row(*(cell(fit, fit.rows[place]) for cell in columns.values()))
        parts += [Text(), table]
    if found.misfits:
        parts += [Text(), _misfits(found.misfits)]
    sgd = training.local_optimizer.name == "sgd"
    state = ", momentum" if training.momentum and sgd else "" if sgd else ", optimizer state"
    kept = f"weights, gradients{state}"
    notes = [
        f"MB to train: {kept} and activations of a batch of {training.batch_size}. Fewer bytes and % of MACs: compared "
        "with dense FedAvg. Limit: what the next larger size would exceed. "
    ]
    if any(fit.personal for fit in found.fits):
        notes.append("*: personal models. ")
    if any(row.seconds is None for fit in found.fits for row in fit.rows):
        notes.append("To see seconds, give the speed of the link (--link 2Mbps). ")
    elif not all(device.speed for device in request.devices):
        notes.append("Seconds count transfers only; give a device's speed (5 GMAC/s) to add computation. ")
    if all(row.joules is None for fit in found.fits for row in fit.rows):
        notes.append("To see energy, give --joules-per-mb and --joules-per-gmac. ")
    notes.append("Metrics are not predicted: use fedfactor compare to measure them.")
    parts += [Text(), Text("".join(notes), style="dim"), Text(), Text(sentence(found), style="bold")]
    return Group(*parts)


def _columns(found: Advice, rounds: int | None) -> dict[str, Callable[[Fit, DevicePlan], str]]:
    """Return the columns by heading, without those for which nothing is known."""
    rows = [row for fit in found.fits for row in fit.rows]
    columns: dict[str, Callable[[Fit, DevicePlan], str]] = {
        "method": lambda fit, row: fit.method.name + ("*" if fit.personal else ""),
        "size": lambda fit, row: f"{row.capacity:g}" if fit.method.traits.adapts else _setting(row),
        "para-\nmeters": lambda fit, row: amount(row.size.parameters),
        "MMAC": lambda fit, row: plain(row.size.macs / 1e6),
        "MB to\ntrain": lambda fit, row: plain(row.size.memory / 1e6),
        "activ-\nations": lambda fit, row: plain(row.size.activations / 1e6),
        "MB\nup": lambda fit, row: plain(row.size.up / 1e6),
        "MB\ndown": lambda fit, row: plain(row.size.down / 1e6),
    }
    if any(row.seconds is not None for row in rows):
        columns["s per\nround"] = lambda fit, row: "-" if row.seconds is None else plain(row.seconds)
    if any(row.joules is not None for row in rows):
        columns["J per\nround"] = lambda fit, row: "-" if row.joules is None else plain(row.joules)
    if rounds is not None:
        columns[f"GB in\n{rounds}"] = lambda fit, row: plain(rounds * (row.size.up + row.size.down) / 1e9)
    columns["fewer\nbytes"] = lambda fit, row: f"{plain(row.bytes_ratio)}x"
    columns["% of\nMACs"] = lambda fit, row: plain(100 * row.macs_ratio)
    columns["limit"] = lambda fit, row: ", ".join(SHORT[word] for word in row.stopped_by)
    return columns


SHORT = {"up": "up", "down": "down", "memory": "MB", "macs": "MMAC", "seconds": "s", "joules": "J"}


def _misfits(misfits: dict[str, str]) -> Table:
    """Return a table of the methods that do not fit, one row per reason."""
    table = Table("does not fit", "why", **SPARE)
    why: dict[str, list[str]] = {}
    for name, reason in sorted(misfits.items()):
        why.setdefault(reason, []).append(name)
    table.columns[0].ratio, table.columns[1].ratio = 1, 2
    for reason, names in why.items():
        table.add_row(", ".join(names), escape(reason))
    return table


def as_dict(found: Advice, rounds: int | None = None) -> dict[str, Any]:
    """Return the advice as plain data."""
    fit = found.choice
    rows = [{**row.as_dict(), "personal": one.personal} for one in found.fits for row in one.rows]
    if rounds is not None:
        for row in rows:
            row["total_bytes"] = rounds * (row["size"]["up"] + row["size"]["down"])
    made = {
        "model": found.request.tables["model"],
        "dense": dataclasses.asdict(found.dense),
        "devices": [dataclasses.asdict(device) for device in found.request.devices],
        "fits": rows,
        "misfits": found.misfits,
        "choice": None if fit is None else fit.method.name,
        "why": sentence(found),
    }
    as_json: dict[str, Any] = json.loads(json.dumps(made), parse_constant=lambda _: None)  # NaN, not known, is null
    return as_json


def to_recipe(found: Advice, name: str) -> str:
    """Return the choice as a recipe.

    Raises PlanError if no method fits or if the data set is not known.
    """
    fit, request = found.choice, found.request
    if fit is None:
        raise PlanError(f"there is no choice to write as a recipe. {sentence(found)}")
    request.check_data()
    tables = {key: value for key, value in request.tables.items() if key != "name"}
    shares: dict[float, float] = {}
    for share, row in zip(request.shares, fit.rows, strict=True):
        shares[row.capacity] = shares.get(row.capacity, 0.0) + share
    levels = sorted(shares, reverse=True)
    tables["method"] = {"name": fit.rows[0].method, **fit.rows[0].settings}
    tables["capacities"] = {"levels": levels, "shares": [round(shares[level], 6) for level in levels]}
    if all(None not in (device.speed, *request.link_of(device)) for device in request.devices):
        devices = {device.name: device.in_fleet(*request.link_of(device)) for device in request.devices}
        tables["fleet"] = {"devices": devices, "fit_capacities": fit.method.traits.adapts}
    tables = {"name": name, **tables}
    recipe.resolve(tables, "the plan's recipe")  # `fedfactor run` must accept it
    lines = [f"# {sentence(found)}", *(f"# {_described(device)}" for device in request.devices)]
    return "\n".join(lines) + "\n" + tomli_w.dumps(tables)


def _described(device: Device) -> str:
    limits = [
        f"{quantity(key, getattr(device, key))} {WORDS[key]}" for key in WORDS if getattr(device, key) is not None
    ]
    return f"{device.name}: {', '.join(limits) or 'no limit'}"
