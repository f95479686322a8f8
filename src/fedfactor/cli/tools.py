"""Commands before and after a run: plan, export and audit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedfactor.cli.common import AsJson, DataDir, Quiet, console, listed, numbers, tell
from fedfactor.support.files import write_text


def plan(
    model: Annotated[str, typer.Option(help="A network by name, or package.module:function.")],
    device: Annotated[
        list[str], typer.Option(help='A kind of device: "phone: 2 MB up, 60 MMAC, 40 MB, 30 %". Repeatable.')
    ],
    shape: Annotated[str | None, typer.Option("--input", help="Shape of an input: 3x32x32.")] = None,
    tokens: Annotated[int, typer.Option(help="Inputs are token ids below this number.", min=0)] = 0,
    classes: Annotated[int | None, typer.Option(help="Number of classes. Default: 10.", min=1)] = None,
    link: Annotated[str | None, typer.Option(help="Speed of the link: 2Mbps. A device may set its own.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Also show the cost of this many rounds.", min=1)] = None,
    examples: Annotated[int, typer.Option(help="Training examples per client.", min=1)] = 500,
    joules_per_mb: Annotated[float | None, typer.Option(help="Energy per megabyte on the link.", min=0)] = None,
    joules_per_gmac: Annotated[float | None, typer.Option(help="Energy per 10^9 operations.", min=0)] = None,
    capacities: Annotated[str, typer.Option(help="Shares of the model to try, such as 1,0.5,0.25.")] = "",
    methods: Annotated[str, typer.Option(help="Only these methods, separated by commas. Default: all.")] = "",
    personal: Annotated[bool, typer.Option("--personal", help="Choose among methods with personal models.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set a key of the recipe: --set codec.name=int8. Repeatable."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Data set of the recipe. Default: one that fits the input and the classes.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="Also show the noise that this epsilon needs.", min=0)] = None,
    delta: Annotated[float | None, typer.Option(help="Delta of --epsilon, below 1 / --clients.", min=0)] = None,
    clients: Annotated[int, typer.Option(help="Number of clients, for --epsilon.", min=2)] = 1000,
    cohorts: Annotated[str, typer.Option(help="Clients per round, for --epsilon: 50,500 or shares.")] = "",
    recipe: Annotated[Path | None, typer.Option(help="Write the chosen method as a recipe to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the methods, ranks and widths that fit your devices, and show their costs."""
    from fedfactor import advise

    levels = {"capacities": tuple(numbers("--capacities", capacities, "1,0.5", float))} if capacities else {}
    request = advise.request_of(
        model, shape, classes, device, data=data, tokens=tokens, rounds=rounds, settings=settings or [],
        mbps=advise.link(link) if link else None, examples=examples, joules_per_mb=joules_per_mb,
        joules_per_gmac=joules_per_gmac, personal=personal, methods=tuple(listed(methods)), **levels,
    )  # fmt: skip
    if epsilon is not None:
        delta = advise.check_guarantee(epsilon, delta, clients)
    if recipe:
        request.check_data()  # now, and not after a minute of work
        if not recipe.parent.is_dir():
            raise ValueError(f"the folder {recipe.parent} does not exist; create it first")
    found = advise.advise(request)
    noise = None
    if epsilon is not None and delta is not None:
        sizes = numbers("--cohorts", cohorts, "50,500", float) if cohorts else []
        length = rounds or request.resolved.rounds.rounds
        noise = advise.plan_privacy(epsilon, delta, clients, length, sizes, found.dense.parameters)
    text = advise.to_recipe(found, recipe.stem) if recipe else ""
    if as_json:
        privacy = {"privacy": dataclasses.asdict(noise)} if noise else {}
        print(json.dumps({**advise.as_dict(found, rounds), **privacy}, indent=1))
    else:
        console.print(advise.render(found, rounds))
        if noise:
            console.print(advise.render_privacy(noise))
    if recipe:
        write_text(recipe, text)
        if not as_json:
            tell(f"wrote {recipe}; next: fedfactor run {recipe}")


def export(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, also that of a Flower node.")],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="File to write (.safetensors, .pt2, .onnx), or a folder for an adapter of PEFT.",
        ),
    ],
    capacity: Annotated[float | None, typer.Option(help="Capacity of the server's model. Default: largest.")] = None,
    client: Annotated[int | None, typer.Option(help="Export this client's own model; clients count from 0.")] = None,
    at_round: Annotated[int | None, typer.Option("--round", help="A round that was kept. Default: the last.")] = None,
    data_dir: DataDir = None,
    without_data: Annotated[
        bool, typer.Option("--without-data", help="Check on random inputs and do not measure the model.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="The network of a run that was started by `simulate`: package.module:function."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write the whole model into the folder, with the adapter merged into it.")
    ] = False,
) -> None:
    """Write a run's model as plain torch or ONNX, or its adapter for PEFT, checked, with a model card."""
    from fedfactor.export import export as export_run
    from fedfactor.export.card import shown

    found = export_run(
        directory, out, capacity=capacity, client=client, round=at_round, data_dir=data_dir,
        with_data=not without_data, model=model, merge=merge,
    )  # fmt: skip
    files = [str(path) for path in (found.path, found.architecture, found.card) if path is not None]
    scores = ", ".join(f"{name} {score:.4f}" for name, score in shown(found.scores).items())
    scored = f"; {scores} on the test data" if scores else ""
    tell(f"wrote {', '.join(files)}{scored}. To load it:\n")
    tell(found.snippet)


def audit(
    directory: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory. Its recipe must set run.keep_rounds.")
    ],
    mode: Annotated[
        str,
        typer.Option(
            help="gradient: attack the gradient of a few images (FedDecomp, Section 4.6). update: a client's upload."
        ),
    ] = "gradient",
    rounds: Annotated[str, typer.Option(help="Rounds to audit, such as 10,20,30. Default: all kept rounds.")] = "",
    clients: Annotated[int, typer.Option(help="Number of clients to attack, from the first.", min=1)] = 20,
    images: Annotated[int, typer.Option(help="Images per client.", min=1)] = 5,
    iterations: Annotated[int, typer.Option(help="Steps per attack.", min=1)] = 1000,
    restarts: Annotated[int, typer.Option(help="Restarts from other noise; the best match counts.", min=1)] = 1,
    lr: Annotated[float, typer.Option(help="Size of the first steps; colours range over 1.", min=0)] = 0.1,
    tv: Annotated[float, typer.Option(help="Weight of total variation; try 1 if the result is noise.", min=0)] = 0.001,
    seed: Annotated[int, typer.Option(help="Seed of the choice of images and of the noise.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Report to write, with a .json beside it. Default: RUN/audit-MODE.html."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    data_dir: DataDir = None,
    quiet: Quiet = False,
) -> None:
    """Try to reconstruct clients' images from their uploads."""
    from fedfactor.audit import Attack, AttackResult
    from fedfactor.audit import audit as audit_run
    from fedfactor.cli.screen import Progress

    chosen = numbers("--rounds", rounds, "10,20,30", int)
    report_path = out or directory / f"audit-{mode}.html"
    if report_path.suffix != ".html":
        raise ValueError(f"the report is an HTML file: --out needs a name that ends in .html, got {report_path}")
    attack = Attack(mode, images, iterations, restarts, lr, tv, seed)  # type: ignore[arg-type]  # it checks the mode
    with Progress(console, quiet) as progress:
        steps = progress.steps(directory.name)

        def note(one: AttackResult) -> None:
            steps.note(f"round {one.round}, client {one.client}: best of {len(one.psnr)} {max(one.psnr):.1f} dB")

        report = audit_run(
            directory,
            attack,
            rounds=chosen,
            clients=clients,
            data_dir=data_dir,
            device=device,
            on_start=steps.start,
            on_iteration=steps.step,
            on_attack=note,
        )
    report.write(report_path)
    if not quiet:
        table = Table("PSNR in dB", "average", "maximum", "average of a flat image", "images better than flat")
        for name, figures in [("all", report.figures()), *((f"round {r}", report.figures(r)) for r in report.rounds)]:
            values = [f"{figures[key]:.2f}" for key in ("average", "maximum", "flat_average")]
            table.add_row(name, *values, f"{100 * figures['better_than_flat']:.0f} %")
        console.print(table)
        tell(f"images: {report_path}; data: {report_path.with_suffix('.json')}")
