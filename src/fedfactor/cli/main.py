"""The command line. Errors are one red sentence and exit code 2; `--debug` shows where they come from."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedfactor import __version__
from fedfactor.cli.flower import app as flower_app
from fedfactor.cli.recipes import app as recipes_app

if TYPE_CHECKING:
    from fedfactor.runs.recipe import Recipe

app = typer.Typer(
    help="Federated learning of factorised models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console()
if not console.is_terminal and "COLUMNS" not in os.environ:
    console = Console(width=160)  # no screen is too narrow for a file or another program


def _version(wanted: bool) -> None:
    if wanted:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning of factorised models."""


@app.command()
def tables(
    paper: Annotated[str | None, typer.Option(help="Only this paper: fedpara, flanc, fedhm, prism, feddecomp.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array of rows instead of tables.")] = False,
) -> None:
    """Recompute every count the papers print and show ours beside theirs."""
    from fedfactor.tables import compute, render

    rows = compute(paper)
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=1))
    else:
        console.print(render(rows))


@app.command()
def methods(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array of entries instead of tables.")] = False,
) -> None:
    """List every method, optimizer and codec with its paper and its fields."""
    from fedfactor.registry import KINDS, entries

    found = {kind: entries(kind) for kind in KINDS}
    if as_json:
        print(json.dumps([entry.as_dict() for kind in KINDS for entry in found[kind].values()], indent=1))
        return
    for kind, known in found.items():
        table = Table("name", "what it is", "fields", "paper", title=kind, title_justify="left", show_lines=True)
        for entry in known.values():
            lines = [f"{field['name']} = {field['default']}: {field['help']}" for field in entry.fields()]
            table.add_row(entry.name, escape(entry.summary), escape("\n".join(lines)), entry.paper)
        console.print(table)


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="A recipe file (TOML), or the name of a packaged recipe.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key: --set train.rounds=5. Repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; default runs/NAME. A sweep gets one below it a cell.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="inline: clients in this process; pool: in worker processes; flower-local: a Flower deployment on "
            "this machine, a node a client; flower-ray: Flower's simulation."
        ),
    ] = "inline",
    workers: Annotated[int, typer.Option(help="Worker processes of the pool; 0: one a core.", min=0)] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...: short for --set train.device=...")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where data sets are; default FEDFACTOR_DATA or a cache folder.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Carry on with what the run directory holds.")] = False,
    small: Annotated[bool, typer.Option("--small", help="Apply the recipe's overlay for a quick try.")] = False,
    only: Annotated[str, typer.Option(help="Of a sweep, only the cells whose name matches this pattern.")] = "*",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    log: Annotated[
        list[str] | None, typer.Option(help="Also write for another viewer: tensorboard or mlflow. Repeatable.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where the time went; write trace.json for Perfetto or Chrome.")
    ] = False,
) -> None:
    """Run a recipe, or all cells of a sweep, and write run directories. Ctrl-C stops at a checkpoint."""
    from fedfactor.cli.screen import Progress, results, where_time_went
    from fedfactor.engines import Inline, Pool
    from fedfactor.profile import recording
    from fedfactor.runs import loggers
    from fedfactor.runs.execute import run as run_recipe
    from fedfactor.runs.execute import summary
    from fedfactor.runs.interrupts import Stop, each, resume_command

    loggers.check(log or [])
    _check_engine(engine, workers, profile)
    tables = _tables(recipe, small)
    resolved = _cells(tables, recipe, [*(settings or []), *([f"train.device={device}"] if device else [])], only)
    folder = out or Path("runs") / next(iter(resolved.values())).tables["name"]
    found, recorders = {}, {}
    try:
        with Progress(console, quiet) as progress, Pool(workers) as pool, Stop(progress.notice) as stop:
            for name, one in resolved.items():
                where = folder / name if "sweep" in tables else folder
                stop.round = 0
                with (
                    loggers.logging(log or [], where, name, one.tables) as logged,
                    recording() if profile else nullcontext() as recorder,
                ):
                    on_event = each(progress.start(name, one.rounds.rounds), logged, stop.listen)
                    if engine.startswith("flower"):
                        found[name] = _on_flower(engine, one, where, resume, data_dir, on_event)
                    else:
                        used = pool if engine == "pool" else Inline()
                        result = run_recipe(
                            one, where, resume=resume, engine=used, data_dir=data_dir, on_event=on_event
                        )
                        found[name] = summary(result)
                if recorder is not None:
                    recorder.write(where / "trace.json")
                    recorders[name] = recorder
    except KeyboardInterrupt:
        _complain(f"stopped; everything up to round {stop.round} of {where} is kept. This carries on:")
        print(resume_command(sys.argv), file=sys.stderr)
        raise typer.Exit(130) from None
    if not quiet:
        console.print(results(found, {name: one.tables["paper"] for name, one in resolved.items()}))
        for name, recorder in recorders.items():
            console.print(where_time_went(name, recorder))
        words = f"written to {folder}; next: fedfactor report {shlex.quote(str(folder))} -o report.html"
        console.print(words, highlight=False, markup=False, soft_wrap=True)


ENGINES = ("inline", "pool", "flower-local", "flower-ray")


def _check_engine(engine: str, workers: int, profile: bool) -> None:
    if engine not in ENGINES:
        raise ValueError(f"there is no engine {engine!r}; there are {', '.join(ENGINES)}")
    if workers and engine != "pool":
        raise ValueError(f"--workers needs --engine pool: {engine} has none")
    if profile and engine.startswith("flower"):
        raise ValueError(f"--profile sees the processes of inline and pool, not those of {engine}")


def _on_flower(
    engine: str, recipe: Recipe, where: Path, resume: bool, data_dir: Path | None, on_event: Callable[[Any], None]
) -> dict[str, Any]:
    from fedfactor.engines.flower.adapter import QUIET  # noqa: F401  # says what to install
    from fedfactor.runs.flower.local import run_local

    simulated = engine == "flower-ray"
    return run_local(recipe, where, resume=resume, simulation=simulated, data_dir=data_dir, on_event=on_event)


def _tables(recipe: Path, small: bool = False) -> dict[str, Any]:
    """Read a recipe, which has the name of its file if it says no other."""
    from fedfactor.runs import recipe as recipes
    from fedfactor.runs.catalog import find

    tables = recipes.read(find(recipe))
    tables.setdefault("name", recipe.stem)
    return recipes.small(tables) if small else tables


def _cells(tables: dict[str, Any], recipe: Path, settings: list[str], only: str) -> dict[str, Recipe]:
    """Return the cells of a recipe whose name matches, resolved."""
    from fedfactor.runs import recipe as recipes

    found = recipes.overridden_cells(tables, settings)
    chosen = {name: cell for name, cell in found.items() if fnmatch.fnmatchcase(name, only)}
    if not chosen:
        raise ValueError(f"no cell of {recipe} matches {only!r}; there are {', '.join(recipes.cells(tables))}")
    return {name: recipes.resolve(cell, f"{recipe} ({name})") for name, cell in chosen.items()}


@app.command()
def audit(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory whose recipe has keep_rounds.")],
    mode: Annotated[
        str, typer.Option(help="gradient: of a few pictures, as FedDecomp's Section 4.6; update: of a client's round.")
    ] = "gradient",
    rounds: Annotated[str, typer.Option(help="Kept rounds, such as 10,20,30; default: all of them.")] = "",
    clients: Annotated[int, typer.Option(help="Attack the first so many clients.", min=1)] = 20,
    images: Annotated[int, typer.Option(help="Pictures a client.", min=1)] = 5,
    iterations: Annotated[int, typer.Option(help="Steps of an attack.", min=1)] = 1000,
    restarts: Annotated[int, typer.Option(help="Starts from other noise; the best match counts.", min=1)] = 1,
    lr: Annotated[float, typer.Option(help="Size of the first steps; the range of colours is 1.", min=0)] = 0.1,
    tv: Annotated[float, typer.Option(help="Weight of total variation; try 1 where noise comes out.", min=0)] = 0.001,
    seed: Annotated[int, typer.Option(help="Of the choice of pictures and of the noise.", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Report; default RUN/audit-MODE.html, and all of it as .json.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Try to recover clients' pictures from what they upload."""
    from fedfactor.audit import Attack, AttackResult
    from fedfactor.audit import audit as audit_run
    from fedfactor.cli.screen import Progress

    words = [word.strip() for word in rounds.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--rounds takes numbers with commas, such as 10,20,30, got {rounds!r}")
    report_path = out or directory / f"audit-{mode}.html"
    if report_path.suffix != ".html":
        raise ValueError(f"the report is an HTML file: give a name that ends in .html, got {report_path}")
    attack = Attack(mode, images, iterations, restarts, lr, tv, seed)  # type: ignore[arg-type]  # it checks the mode
    with Progress(console, quiet) as progress:
        steps = progress.steps(directory.name)

        def tell(one: AttackResult) -> None:
            steps.note(f"round {one.round}, client {one.client}: best of {len(one.psnr)} {max(one.psnr):.1f} dB")

        report = audit_run(
            directory,
            attack,
            rounds=[int(word) for word in words],
            clients=clients,
            data_dir=data_dir,
            device=device,
            on_start=steps.start,
            on_iteration=steps.step,
            on_attack=tell,
        )
    report.write(report_path)
    if not quiet:
        table = Table("PSNR in dB", "average", "maximum", "a flat picture's average", "pictures better than flat")
        for name, figures in [("all", report.figures()), *((f"round {r}", report.figures(r)) for r in report.rounds)]:
            numbers = [f"{figures[key]:.2f}" for key in ("average", "maximum", "flat_average")]
            table.add_row(name, *numbers, f"{100 * figures['better_than_flat']:.0f} %")
        console.print(table)
        console.print(f"pictures: {report_path}; as data: {report_path.with_suffix('.json')}", highlight=False)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders that hold some.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    target: Annotated[
        float | None,
        typer.Option(help="Show what this accuracy cost; default: the recipes' target, or what all runs reach."),
    ] = None,
    joules_per_byte: Annotated[
        float | None, typer.Option(help="Energy of the link, where recipes do not say it.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page; default: the recipes' names.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Show a run, or compare many, on one page that needs no network."""
    from fedfactor.report import counted
    from fedfactor.report import report as write_report

    groups = write_report(runs, out, target=target, joules_per_byte=joules_per_byte, title=title)
    if not quiet:
        count = sum(len(group.runs) for group in groups)
        runs_, settings = counted(count, "run"), counted(len(groups), "setting")
        console.print(f"{out}: {runs_} of {settings}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def new(
    kind: Annotated[str, typer.Argument(help="method or recipe.")],
    name: Annotated[str, typer.Argument(help="Its name, and that of the file.")],
    folder: Annotated[Path, typer.Option("--out", "-o", help="Folder to write into.")] = Path(),
) -> None:
    """Write a method or a recipe to start from, which runs as it is."""
    from fedfactor.cli.new import new as write_new

    path = write_new(kind, name, folder)
    command = f"python {path}" if kind == "method" else f"fedfactor run {path}"
    console.print(f"wrote {path}; next: {command}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def compare(
    recipe: Annotated[Path, typer.Argument(help="A recipe file (TOML), or the name of a packaged recipe.")],
    methods: Annotated[str, typer.Option(help="Methods, with commas: fedavg,fedpara,flanc.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory of all runs: METHOD/seed-N below it.")],
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "1,2,3",
    jobs: Annotated[int, typer.Option(help="Runs at once, each in a process of its own.", min=1)] = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key for all: --set train.rounds=5. Repeatable.")
    ] = None,
    method_settings: Annotated[
        list[str] | None, typer.Option("--method-set", help="Of one method: fedpara.gamma=0.3. Repeatable.")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Apply the recipe's overlay for a quick try.")] = False,
    only: Annotated[str, typer.Option(help="Of a sweep, take methods' settings from cells that match this.")] = "*",
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are.")] = None,
    latex: Annotated[bool, typer.Option("--latex", help="Print the table as LaTeX.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Run methods side by side over seeds: what is missing is run, what was cut is carried on."""
    from fedfactor.cli.screen import Progress
    from fedfactor.report import comparison
    from fedfactor.report import report as write_report
    from fedfactor.runs import compare as comparing

    tables = _tables(recipe, small)
    words = _words(seeds)
    if not all(word.removeprefix("-").isdecimal() for word in words):
        raise ValueError(f"--seeds takes whole numbers with commas, such as 1,2,3, got {seeds!r}")
    cells = comparing.cells(
        tables, _words(methods), [int(word) for word in words], out, settings=settings or [],
        method_settings=method_settings or [], only=only, where=str(recipe),
    )  # fmt: skip
    # Progress goes to standard error, so that the table can be piped.
    try:
        with Progress(Console(stderr=True), quiet) as progress:
            outcomes = comparing.compare(
                cells,
                jobs=jobs,
                data_dir=data_dir,
                on_start=lambda cell: progress.start(cell.name, cell.recipe.rounds.rounds),
            )
    except KeyboardInterrupt:
        _complain("interrupted; the same command carries on")
        raise typer.Exit(130) from None
    lines = comparison.lines(outcomes)
    if latex:
        print(comparison.latex(lines), end="")
    elif as_csv:
        print(comparison.csv_text(lines), end="")
    elif as_json:
        print(json.dumps([line.as_dict() for line in lines], indent=1))
    else:
        console.print(comparison.table(lines))
    done = [outcome.cell.directory for outcome in outcomes if not outcome.failure]
    if done and importlib.util.find_spec("plotly") is None:
        _complain("the report needs the package plotly: pip install 'fedfactor[report]'")
    elif done:
        write_report(done, out / "report.html")
        Console(stderr=True, soft_wrap=True).print(f"report: {out / 'report.html'}", highlight=False, markup=False)
    for outcome in outcomes:
        if outcome.failure:
            _complain(f"{outcome.cell.name}: {outcome.failure}")
    if any(outcome.failure for outcome in outcomes):
        raise typer.Exit(1)


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="A network by name, or package.module:function.")],
    device: Annotated[
        list[str], typer.Option(help='A kind of device: "phone: 2 MB up, 60 MMAC, 40 MB, 30 %". Repeatable.')
    ],
    shape: Annotated[str | None, typer.Option("--input", help="Shape of an input: 3x32x32.")] = None,
    tokens: Annotated[int, typer.Option(help="Inputs are token ids below this.", min=0)] = 0,
    classes: Annotated[int | None, typer.Option(help="Number of classes; default 10.", min=1)] = None,
    link: Annotated[str | None, typer.Option(help="Speed of the link: 2Mbps; a device may have its own.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Also say what so many rounds cost.", min=1)] = None,
    examples: Annotated[int, typer.Option(help="Training examples of a client.", min=1)] = 500,
    joules_per_mb: Annotated[float | None, typer.Option(help="Energy of a megabyte on the link.", min=0)] = None,
    joules_per_gmac: Annotated[float | None, typer.Option(help="Energy of 10^9 operations.", min=0)] = None,
    capacities: Annotated[str, typer.Option(help="Shares of the model to try, such as 1,0.5,0.25.")] = "",
    methods: Annotated[str, typer.Option(help="Only these, with commas; default: all.")] = "",
    personal: Annotated[bool, typer.Option("--personal", help="Choose among methods with personal models.")] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A recipe's key: --set train.batch_size=16, codec.name=int8.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Data set of the recipe; default: by input and classes.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Write the choice as a recipe to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Find methods, ranks and widths that fit your devices, and what they cost there."""
    from fedfactor import advise

    levels = {"capacities": tuple(_numbers("--capacities", capacities))} if capacities else {}
    request = advise.request_of(
        model, shape, classes, device, data=data, tokens=tokens, rounds=rounds, settings=settings or [],
        mbps=advise.link(link) if link else None, examples=examples, joules_per_mb=joules_per_mb,
        joules_per_gmac=joules_per_gmac, personal=personal, methods=tuple(_words(methods)), **levels,
    )  # fmt: skip
    found = advise.plan(request)
    text = advise.to_recipe(found, recipe.stem) if recipe else ""
    if as_json:
        print(json.dumps(advise.as_dict(found, rounds), indent=1))
    else:
        console.print(advise.render(found, rounds))
    if recipe:
        recipe.write_text(text, encoding="utf-8")
        if not as_json:
            console.print(
                f"wrote {recipe}; next: fedfactor run {recipe}", highlight=False, markup=False, soft_wrap=True
            )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(word) for word in _words(text)]
    except ValueError:
        raise ValueError(f"{option} takes numbers with commas, such as 1,0.5, got {text!r}") from None


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write: .safetensors, .pt2 or .onnx.")],
    capacity: Annotated[float | None, typer.Option(help="Capacity of the server's model; default: largest.")] = None,
    client: Annotated[int | None, typer.Option(help="This client's own model, counted from 0.")] = None,
    at_round: Annotated[int | None, typer.Option("--round", help="A round that was kept; default: the last.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are.")] = None,
    without_data: Annotated[
        bool, typer.Option("--without-data", help="Check on random inputs and measure no accuracy.")
    ] = False,
) -> None:
    """Write a run's model as plain torch or ONNX, checked, with a card beside it."""
    from fedfactor.export import export as export_run

    found = export_run(
        directory, out, capacity=capacity, client=client, round=at_round, data_dir=data_dir, with_data=not without_data
    )
    files = [str(path) for path in (found.path, found.architecture, found.card) if path is not None]
    scored = "" if found.accuracy is None else f"; accuracy {found.accuracy:.4f} on the test data"
    console.print(f"wrote {', '.join(files)}{scored}. To load it:\n", highlight=False, markup=False, soft_wrap=True)
    console.print(found.snippet, highlight=False, markup=False, soft_wrap=True)


app.add_typer(flower_app, name="flower")
app.add_typer(recipes_app, name="recipes")

data_app = typer.Typer(help="Look at data sets and how they are split.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.command("show")
def data_show(
    recipe: Annotated[Path, typer.Argument(help="A recipe file (TOML), or the name of a packaged recipe.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key: --set partition.alpha=0.1. Repeatable.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are.")] = None,
    only: Annotated[str, typer.Option(help="Of a sweep, the first cell whose name matches this pattern.")] = "*",
) -> None:
    """Print and draw who has how much of what."""
    from fedfactor.data import draw, federated, load

    name, found = next(iter(_cells(_tables(recipe), recipe, settings or [], only).items()))
    resolved = found.tables
    dataset = load(data_dir=data_dir, **resolved["data"])
    console.print(str(dataset), highlight=False)
    console.print(draw(federated(dataset, **resolved["partition"]), dataset.class_names, title=name))


def _complain(sentence: str, kind: str = "") -> None:
    """Write a red sentence to standard error."""
    head = f"[bold red]{kind}:[/] " if kind else ""
    Console(stderr=True, soft_wrap=True).print(f"{head}[red]{escape(sentence)}[/]")


def main() -> None:
    """Run the command line."""
    try:
        app()  # exits by itself: 0 when done, 2 on wrong usage
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        _complain(str(error), type(error).__name__)
        sys.exit(2)
