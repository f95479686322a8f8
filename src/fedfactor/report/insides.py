"""What methods note of themselves: ranks in use, bases, picked kernels, and any other number."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedfactor.factor import effective_rank
from fedfactor.report.groups import Group, Mean
from fedfactor.report.parts import (
    DASHES,
    MOST_POINTS,
    MOST_ROWS,
    Figure,
    Fold,
    Piece,
    Section,
    Table,
    Text,
    axes,
    bars,
    colour,
    label,
    lines,
    number,
    thin,
)
from fedfactor.report.read import Point, RunData
from fedfactor.runs.directory import RunError
from fedfactor.runs.open import load

RANK = "effective_rank"


def ranks(groups: Sequence[Group]) -> Section:
    """Return the rank in use, a line a layer: as the method notes it, else of the models that a run has kept."""
    pieces: list[Piece] = [
        Text(
            "The rank actually used: the exponential of the entropy of a weight's singular values (PriSM, Section "
            "4.3). A group's first run stands for it."
        )
    ]
    unknown: dict[str, list[str]] = {}
    at_the_end: dict[str, tuple[Group, dict[str, list[Point]]]] = {}
    for group in groups:
        run = group.runs[0]
        if RANK in run.observed:
            series, source = run.observed[RANK], "as the method noted it every round"
        else:
            try:
                series, source = kept_ranks(run), "of the server's model in the rounds that the run directory keeps"
            except (RunError, ValueError, OSError) as error:
                unknown.setdefault(str(error), []).append(group.label)
                continue
        if max(map(len, series.values()), default=0) < 2:  # no line to draw
            at_the_end[group.label] = group, series
            continue
        pieces.append(
            _by_layer(f"rank-{group.number}", f"{group.label}: rank in use", source, series, "effective rank")
        )
    if at_the_end:
        pieces.append(_last_ranks(list(at_the_end.values())))
    pieces += [Text(f"Not known of {', '.join(names)}: {reason}.") for reason, names in unknown.items()]
    return Section("ranks", "Rank in use", pieces)


def _last_ranks(found: Sequence[tuple[Group, Mapping[str, Sequence[Point]]]]) -> Figure:
    """Draw the ranks of runs that are known after one round only."""
    layers = list(dict.fromkeys(layer for _, series in found for layer in series))
    traces, rows = [], []
    for group, series in found:
        means = [Mean(series[layer][-1][1], None, 1) if layer in series else None for layer in layers]
        traces.append(bars(group, layers, means, hover="%{fullData.name}<br>%{x}: %{y:.4g}<extra></extra>"))
        rows.append([group.label, *("-" if one is None else f"{one.value:.4g}" for one in means)])
    return Figure(
        "rank-last",
        "Rank in use after the last round",
        "Layers in the network's order. With run.keep_rounds in the recipe, earlier rounds are known too.",
        traces,
        axes("layer", "effective rank", x_showgrid=False, x_type="category"),
        Table(["run", *layers], rows, "Rank in use after the last round"),
    )


def kept_ranks(run: RunData) -> dict[str, list[Point]]:
    """Compute the effective ranks of a run's models in its kept rounds and in its last."""
    if str(run.protocol.get("global", "none")).startswith("none"):
        raise RunError("the server alone has no model, since part of every model is private")
    found: dict[str, list[Point]] = {}
    there = load(run.directory)
    for round in [*(kept for kept in there.kept if kept != run.last_round), None]:
        model = load(run.directory, round).model()
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and min(len(weight), weight[0].numel()) > 1:
                point = (run.last_round if round is None else round, effective_rank(_singular_values(weight)))
                found.setdefault(name.removesuffix(".weight"), []).append(point)
    return found


def _singular_values(weight: Tensor) -> Tensor:
    """Return them by the smaller Gram matrix, in double precision: small ones hardly count in an entropy."""
    matrix = weight.detach().double().flatten(1)
    matrix = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    values: Tensor = torch.linalg.eigvalsh(matrix @ matrix.T)
    return values.clamp(min=0).sqrt()


def _by_layer(name: str, title: str, source: str, series: Mapping[str, Sequence[Point]], unit: str) -> Figure:
    traces = []
    for place, (layer, points) in enumerate(series.items()):
        shown = thin(points, MOST_POINTS)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines" if len(shown) > 3 else "lines+markers",
                "x": [round for round, _ in shown],
                "y": [number(value) for _, value in shown],
                "name": label(layer or unit),
                "line": {"color": _shade(place, len(series)), "dash": DASHES[place % len(DASHES)], "width": 2},
                "hovertemplate": "%{fullData.name}<br>round %{x}: %{y:.4g}<extra></extra>",
            }
        )
    there = {layer: dict(points) for layer, points in series.items()}
    rounds = thin(sorted({round for points in series.values() for round, _ in points}), MOST_ROWS)
    rows = [
        [str(t), *(f"{value:.4g}" if (value := one.get(t)) is not None else "-" for one in there.values())]
        for t in rounds
    ]
    return Figure(
        name,
        title,
        f"Layers in the network's order, from blue to orange; {source}.",
        traces,
        axes("round", unit, x_rangemode="tozero", y_rangemode="tozero", showlegend=len(series) <= 8),
        Table(["round", *(layer or unit for layer in series)], rows, title),
    )


def _shade(place: int, of: int) -> str:
    """Return a colour between blue and orange that is neither dark nor light."""
    share = place / max(1, of - 1)
    red, green, blue = colorsys.hls_to_rgb(0.58 + 0.5 * share, 0.5, 0.65)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def bases(groups: Sequence[Group]) -> Section | None:
    """Return Gram matrices of FLANC's bases and the use of their vectors (Figures 5 and 6), layer by layer."""
    pieces: list[Piece] = []
    for group in groups:
        run = group.runs[0]
        for place, (layer, gram) in enumerate(run.gram.items()):
            off = max((abs(x) for i, row in enumerate(gram) for j, x in enumerate(row) if i != j), default=0.0)
            diagonal = [gram[i][i] for i in range(len(gram))]
            words = f"diagonal {min(diagonal):.3g} to {max(diagonal):.3g}, beside it at most {off:.3g}"
            name = f"{group.number}-{place}"
            inner: list[Piece] = [_gram(f"gram-{name}", run, layer, gram)]
            if layer in run.mean_abs_u:
                inner.append(_usage(f"usage-{name}", run, layer, run.mean_abs_u[layer]))
            pieces.append(Fold(f"{group.label}, {layer}: {words}", inner, opened=not pieces))
    if not pieces:
        return None
    words = (
        "V V^T of every layer's basis: the identity where vectors are orthonormal. A group's first run stands for it."
    )
    return Section("bases", "Bases that widths share", [Text(words), *pieces])


def _gram(name: str, run: RunData, layer: str, gram: Sequence[Sequence[float]]) -> Figure:
    rows = [[str(place), *(f"{value:.2f}" for value in row)] for place, row in enumerate(gram)]
    trace = {
        "type": "heatmap",
        "z": [list(row) for row in gram],
        "zmid": 0,
        "colorscale": "RdBu",
        "hovertemplate": "vectors %{y} and %{x}: %{z}<extra></extra>",
    }
    layout = axes("basis vector", "basis vector", y_autorange="reversed", y_scaleanchor="x", y_constrain="domain")
    layout["xaxis"]["constrain"] = "domain"
    return Figure(
        name,
        f"{layer}: Gram matrix of the basis",
        f"Inner products of the first {len(gram)} basis vectors after round {run.pictured}.",
        [trace],
        layout,
        Table(["vector", *map(str, range(len(gram)))], rows, f"Gram matrix of {layer}"),
        tall=True,
    )


def _usage(name: str, run: RunData, layer: str, usage: Mapping[str, Sequence[float]]) -> Figure:
    traces = [
        _line(f"width {width}", place, range(len(values)), values)
        for place, (width, values) in enumerate(usage.items())
    ]
    rows = [
        [str(vector), *(f"{x:.4f}" for x in values)] for vector, values in enumerate(zip(*usage.values(), strict=True))
    ]
    return Figure(
        name,
        f"{layer}: mean |U| a column",
        f"How much each width uses each basis vector after round {run.pictured}.",
        traces,
        axes("basis vector", "mean |U|", y_rangemode="tozero", showlegend=True),
        Table(["vector", *(f"width {width}" for width in usage)], rows, f"Mean |U| a column of {layer}"),
    )


def picks(groups: Sequence[Group]) -> Section | None:
    """Return how often each principal kernel was sent to a client (PriSM, Figure 7), layer by layer."""
    pieces: list[Piece] = []
    for group in groups:
        run = group.runs[0]
        for place, (layer, counts) in enumerate(run.picks.items()):
            shares = [100 * count / max(1, run.picked_from) for count in counts]
            words = f"the first by {shares[0]:.0f} % of the clients, the last by {shares[-1]:.0f} %"
            rows = [[str(i), str(counts[i]), f"{shares[i]:.1f} %"] for i in thin(range(len(counts)), MOST_ROWS)]
            figure = Figure(
                f"picks-{group.number}-{place}",
                f"{layer}: how often each kernel was picked",
                "Kernels by falling singular value; per cent of all clients of all rounds.",
                [_line(layer, group.number, range(len(shares)), shares)],
                axes("principal kernel", "per cent of the clients", y_range=[0, 100]),
                Table(["kernel", "times", "share"], rows, f"Picks of the kernels of {layer}"),
            )
            pieces.append(Fold(f"{group.label}, {layer}: {words}", [figure], opened=not pieces))
    return Section("picks", "Kernels that were picked", pieces) if pieces else None


def others(groups: Sequence[Group]) -> Section | None:
    """Return every other number that a method notes."""
    names = dict.fromkeys(name for group in groups for run in group.runs for name in run.observed if name != RANK)
    pieces: list[Piece] = []
    for place, name in enumerate(names):
        single = [group for group in groups if "" in group.runs[0].observed.get(name, {})]
        if single:
            pieces.append(_over_groups(f"noted-{place}", name, single))
        for group in groups:
            several = {key: value for key, value in group.runs[0].observed.get(name, {}).items() if key}
            if several:
                title = f"{group.label}: {_words(name)}"
                pieces.append(_by_layer(f"noted-{place}-{group.number}", title, "as noted", several, _words(name)))
    return Section("noted", "What methods note", pieces) if pieces else None


def _over_groups(ident: str, name: str, groups: Sequence[Group]) -> Figure:
    traces, rows = [], []
    for group in groups:
        points = thin(group.curve(lambda run: run.observed.get(name, {}).get("", [])), MOST_POINTS)
        hover = "%{fullData.name}<br>round %{x}: %{y:.4g}<extra></extra>"
        traces += lines(group, [t for t, _ in points], [one for _, one in points], hover=hover)
        for t, one in thin(points, max(5, MOST_ROWS // len(groups))):
            rows.append([group.label, str(t), one.text(lambda x: f"{x:.4g}")])
    return Figure(
        ident,
        _words(name).capitalize(),
        "As the method notes it. Mean over seeds; bands are its 95 % interval.",
        traces,
        axes("round", _words(name), x_rangemode="tozero"),
        Table(["run", "round", _words(name)], rows, f"{_words(name)} by round"),
    )


def _line(title: str, place: int, xs: Iterable[int], ys: Sequence[float]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(xs),
        "y": [number(y) for y in ys],
        "name": label(title),
        "line": {"color": colour(place), "dash": DASHES[place % len(DASHES)], "width": 2},
        "hovertemplate": "%{fullData.name}<br>%{x}: %{y:.4g}<extra></extra>",
    }


def _words(name: str) -> str:
    return name.replace("_", " ")
