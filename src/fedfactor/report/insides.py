"""What methods record about themselves: ranks in use, bases, picked kernels and other numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from colorsys import hls_to_rgb
from dataclasses import replace

import plotly.graph_objects as go
import torch
from torch import Tensor

from fedfactor.factor import effective_rank
from fedfactor.report.elements import Element, Figure, Fold, Section, Table, Text
from fedfactor.report.groups import Group, Mean
from fedfactor.report.plots import MOST_ROWS, Curve, Scale, bars, colour, dash, figure, line, over_rounds
from fedfactor.report.read import Point, RunData, recorded
from fedfactor.report.values import slug, thin
from fedfactor.runs.directory import RunError
from fedfactor.runs.open import Run

RANK = "effective_rank"
BLUE, ORANGE = 209, 389
"""Hues in degrees. Purple and red lie in between."""
SEVERAL_LAYERS = 8
"""The legend of a figure with more layers than this would cover the plot."""


def ranks(groups: Sequence[Group]) -> Section:
    """Return the rank in use, one line per layer: as the method recorded it, else from the models in the directory."""
    words = "The rank in use is the exponential of the entropy of a weight's singular values (PriSM, Section 4.3)."
    elements: list[Element] = [Text(f"{words} Each group is represented by its first run.")]
    unknown: dict[str, list[str]] = {}
    last_only: list[tuple[Group, Mapping[str, Sequence[Point]]]] = []
    for group in groups:
        series, source = group.runs[0].observed.get(RANK, {}), "as the method recorded it in each round"
        if not series:
            try:
                series, source = kept_ranks(group.runs[0]), "of the server's model in the rounds that the run has kept"
            except (RunError, ValueError, OSError) as error:
                unknown.setdefault(str(error), []).append(group.label)
                continue
        if max(map(len, series.values()), default=0) < 2:  # a single round makes no line
            last_only.append((group, series))
        else:
            title = f"{group.label}: rank in use"
            elements.append(_by_layer(f"rank-{group.slug}", title, source, series, "effective rank"))
    if last_only:
        elements.append(_last_ranks(last_only))
    elements += [Text(f"Unknown for {', '.join(names)}: {reason}.") for reason, names in unknown.items()]
    return Section("ranks", "Rank in use", elements)


def _last_ranks(found: Sequence[tuple[Group, Mapping[str, Sequence[Point]]]]) -> Figure:
    """Draw the ranks of runs for which one round is known."""
    layers = list(dict.fromkeys(layer for _, series in found for layer in series))
    drawn, rows = [], []
    for group, series in found:
        means = [Mean(series[layer][-1][1], None, 1) if layer in series else None for layer in layers]
        drawn.append(bars(group, layers, means, hover="%{fullData.name}<br>%{x}: %{y:.4g}<extra></extra>"))
        rows.append([group.label, *("-" if one is None else f"{one.value:.4g}" for one in means)])
    title, axes = "Rank in use after the last round", ("layer", "effective rank")
    caption = "Layers in the network's order. To see earlier rounds too, list them as run.keep_rounds in the recipe."
    layout, table = {"xaxis_showgrid": False, "xaxis_type": "category"}, Table(["run", *layers], rows, title)
    return figure("rank-last", title, caption, drawn, axes, table, **layout)


def kept_ranks(run: RunData) -> dict[str, list[Point]]:
    """Compute the effective ranks of the server's model, by layer, in the kept rounds and in the last round."""
    if str(run.protocol.get("global", "none")).startswith("none"):
        raise RunError("the server has no complete model, because part of each model is private")
    found: dict[str, list[Point]] = {}
    kept = [round for round in Run(run.directory).kept if round != run.last_round]
    for round in [*kept, None]:
        for name, weight in Run(run.directory, round).model().named_parameters():
            if weight.dim() > 1 and min(len(weight), weight[0].numel()) > 1:
                point = (run.last_round if round is None else round, effective_rank(_singular_values(weight)))
                found.setdefault(name.removesuffix(".weight"), []).append(point)
    return found


def _singular_values(weight: Tensor) -> Tensor:
    """Return singular values from the smaller Gram matrix. Its errors in small values hardly change an entropy."""
    matrix = weight.detach().double().flatten(1)
    matrix = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    values: Tensor = torch.linalg.eigvalsh(matrix @ matrix.T)
    return values.clamp(min=0).sqrt()


def _by_layer(name: str, title: str, source: str, series: Mapping[str, Sequence[Point]], unit: str) -> Figure:
    curves = []
    for place, (layer, points) in enumerate(series.items()):
        hue = (BLUE + (ORANGE - BLUE) * place / max(1, len(series) - 1)) % 360
        means = [(round, Mean(value, None, 1)) for round, value in points]
        red, green, blue = (round(255 * part) for part in hls_to_rgb(hue / 360, 0.5, 0.65))
        curves.append(Curve(layer, means, f"#{red:02x}{green:02x}{blue:02x}", dash(place)))
    caption = f"Layers in the network's order, from blue to orange; {source}."
    legend = len(series) <= SEVERAL_LAYERS
    return over_rounds(name, title, caption, curves, Scale(unit), title, yaxis_rangemode="tozero", showlegend=legend)


def bases(groups: Sequence[Group]) -> Section | None:
    """Return, for each layer, the Gram matrix of FLANC's basis and the use of its vectors (Figures 5 and 6)."""
    folds: list[Element] = []
    for group in groups:
        run = group.runs[0]
        for layer, gram in run.gram.items():
            off = max((abs(x) for i, row in enumerate(gram) for j, x in enumerate(row) if i != j), default=0.0)
            diagonal = [row[i] for i, row in enumerate(gram)]
            words = f"diagonal {min(diagonal):.3g} to {max(diagonal):.3g}, off the diagonal at most {off:.3g}"
            name, when = f"{group.slug}-{slug(layer)}", f"after round {run.matrices_round}"
            inner = [_gram(f"gram-{name}", when, layer, gram)]
            if layer in run.mean_abs_u:
                inner.append(_usage(f"usage-{name}", when, layer, run.mean_abs_u[layer]))
            folds.append(Fold(f"{group.label}, {layer}: {words}", inner, opened=not folds))
    words = "V V^T of each layer's basis, which is the identity if the basis vectors are orthonormal."
    intro = Text(f"{words} Each group is represented by its first run.")
    return Section("bases", "Bases shared by all widths", [intro, *folds]) if folds else None


def _gram(name: str, when: str, layer: str, gram: Sequence[Sequence[float]]) -> Figure:
    drawn = go.Heatmap(z=gram, zmid=0, colorscale="RdBu", hovertemplate="vectors %{y} and %{x}: %{z}<extra></extra>")
    rows = [[str(place), *(f"{value:.2f}" for value in row)] for place, row in enumerate(gram)]
    title, axes = f"{layer}: Gram matrix of the basis", ("basis vector", "basis vector")
    caption = f"Inner products of the first {len(gram)} basis vectors {when}."
    table = Table(["vector", *map(str, range(len(gram)))], rows, f"Gram matrix of {layer}")
    plot = figure(name, title, caption, [drawn], axes, table, xaxis_constrain="domain", yaxis_constrain="domain")
    plot.plot.update_yaxes(autorange="reversed", scaleanchor="x")
    return replace(plot, tall=True)


def _usage(name: str, when: str, layer: str, usage: Mapping[str, Sequence[float]]) -> Figure:
    drawn = [_values(f"width {width}", place, values) for place, (width, values) in enumerate(usage.items())]
    columns = enumerate(zip(*usage.values(), strict=True))
    rows = [[str(vector), *(f"{x:.4f}" for x in values)] for vector, values in columns]
    title, axes = f"{layer}: mean |U| per column", ("basis vector", "mean |U|")
    caption = f"How much each width uses each basis vector {when}."
    table = Table(["vector", *(f"width {width}" for width in usage)], rows, f"Mean |U| per column of {layer}")
    return figure(name, title, caption, drawn, axes, table, yaxis_rangemode="tozero", showlegend=True)


def picks(groups: Sequence[Group]) -> Section | None:
    """Return, for each layer, how often each principal kernel was sent to a client (PriSM, Figure 7)."""
    folds: list[Element] = []
    for group in groups:
        run = group.runs[0]
        for layer, counts in run.picks.items():
            shares = [100 * count / max(1, run.picking_clients) for count in counts]
            words = f"the first kernel by {shares[0]:.0f} % of the clients, the last by {shares[-1]:.0f} %"
            rows = [[str(i), str(counts[i]), f"{shares[i]:.1f} %"] for i in thin(range(len(counts)), MOST_ROWS)]
            name, title = f"picks-{group.slug}-{slug(layer)}", f"{layer}: how often each kernel was picked"
            caption = "Kernels in order of decreasing singular value; per cent of the clients of all rounds."
            table = Table(["kernel", "times", "share"], rows, f"Picks of the kernels of {layer}")
            drawn, axes = [_values(layer, group.number, shares)], ("principal kernel", "per cent of the clients")
            plot = figure(name, title, caption, drawn, axes, table, yaxis_range=[0, 100])
            folds.append(Fold(f"{group.label}, {layer}: {words}", [plot], opened=not folds))
    return Section("picks", "Picked kernels", folds) if folds else None


def records(groups: Sequence[Group]) -> Section | None:
    """Return all other numbers that a method records."""
    names = dict.fromkeys(name for group in groups for run in group.runs for name in run.observed if name != RANK)
    elements: list[Element] = []
    for name in names:
        words = name.replace("_", " ")
        single = [group for group in groups if "" in group.runs[0].observed.get(name, {})]
        if single:
            title, caption = words.capitalize(), "As the method recorded it. Mean over seeds; bands are 95 % intervals."
            curves = [Curve.of(group, group.curve(recorded(name))) for group in single]
            elements.append(
                over_rounds(f"recorded-{slug(name)}", title, caption, curves, Scale(words), f"{words} by round")
            )
        for group in groups:
            layers = {layer: series for layer, series in group.runs[0].observed.get(name, {}).items() if layer}
            if layers:
                ident, title = f"recorded-{slug(name)}-{group.slug}", f"{group.label}: {words}"
                elements.append(_by_layer(ident, title, "as recorded", layers, words))
    return Section("noted", "Other numbers that methods record", elements) if elements else None


def _values(label: str, place: int, values: Sequence[float]) -> go.Scatter:
    """Draw values against their index."""
    return line(label, range(len(values)), values, colour(place), dash(place), "%{x}: %{y:.4g}")
