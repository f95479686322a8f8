"""`fedfactor run` and `fedfactor compare`: the commands that train."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedfactor.cli.common import (
    AsCsv,
    AsJson,
    DataDir,
    Latex,
    Quiet,
    RecipeFile,
    Settings,
    Small,
    complain,
    console,
    listed,
    numbers,
    read_recipe,
    resolved_cells,
    tell,
)
from fedfactor.support.install import install_command

if TYPE_CHECKING:
    from fedfactor.runs.compare import CellOutcome
    from fedfactor.runs.recipe import Recipe

ENGINES = ("inline", "pool", "flower-local", "flower-ray")


def run(
    recipe: RecipeFile,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run directory. Default: runs/NAME. A sweep writes one subdirectory per cell."),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="inline: clients in this process. pool: in worker processes. flower-local: a Flower deployment on "
            "this machine with one node per client. flower-ray: Flower's simulation."
        ),
    ] = "inline",
    workers: Annotated[int, typer.Option(help="Worker processes of the pool. 0: one per core.", min=0)] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...: short for --set train.device=...")] = None,
    data_dir: DataDir = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last committed round.")] = False,
    small: Small = False,
    only: Annotated[str, typer.Option(help="Run only the cells of a sweep whose name matches this pattern.")] = "*",
    quiet: Quiet = False,
    latex: Latex = False,
    as_csv: AsCsv = False,
    as_json: AsJson = False,
    log: Annotated[
        list[str] | None, typer.Option(help="Also log to this viewer: tensorboard or mlflow. Repeatable.")
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
    from fedfactor.runs.compare import CellOutcome, sweep_cell
    from fedfactor.runs.execute import run as run_recipe
    from fedfactor.runs.interrupts import Stop, each, resume_command

    loggers.check(log or [])
    print_table = _table_printer(latex, as_csv, as_json)
    _check_engine(engine, workers, profile)
    tables = read_recipe(recipe, small)
    cells = resolved_cells(tables, recipe, [*(settings or []), *([f"train.device={device}"] if device else [])], only)
    is_sweep = "sweep" in tables or any(setting.startswith("sweep.") for setting in settings or [])
    folder = out or Path("runs") / next(iter(cells.values())).tables["name"]
    found, recorders = {}, {}
    screen = Console(stderr=True, emoji=False) if print_table else console  # so that the table can be piped
    try:
        with Progress(screen, quiet) as progress, Pool(workers) as pool, Stop(progress.notice) as stop:
            for name, cell in cells.items():
                where = folder / name if is_sweep else folder
                stop.round = 0
                with (
                    loggers.logging(log or [], where, name, cell.tables) as logged,
                    recording() if profile else nullcontext() as recorder,
                ):
                    on_event = each(progress.start(name, cell.rounds.rounds), logged, stop.listen)
                    if engine.startswith("flower"):
                        found[name] = _run_on_flower(engine, cell, where, resume, data_dir, on_event)
                    else:
                        used = pool if engine == "pool" else Inline()
                        result = run_recipe(
                            cell, where, resume=resume, engine=used, data_dir=data_dir, on_event=on_event
                        )
                        found[name] = result.summary
                if recorder is not None:
                    recorder.write(where / "trace.json")
                    recorders[name] = recorder
    except KeyboardInterrupt:
        complain(f"stopped; {where} holds everything up to round {stop.round}. Resume with:")
        print(resume_command(sys.argv), file=sys.stderr)
        raise typer.Exit(130) from None
    if print_table:
        print_table([CellOutcome(sweep_cell(name, cells[name], folder), found[name]) for name in found])
    elif not quiet:
        screen.print(results(found, {name: cell.tables["paper"] for name, cell in cells.items()}))
    if not quiet:
        for name, recorder in recorders.items():
            screen.print(where_time_went(name, recorder))
    if not quiet and not print_table:
        tell(f"wrote {folder}; next: fedfactor report {shlex.quote(str(folder))} -o report.html")


def _table_printer(latex: bool, as_csv: bool, as_json: bool) -> Callable[[Sequence[CellOutcome]], None] | None:
    """Return the function that prints runs in the chosen format, or None if no format is chosen."""
    if latex + as_csv + as_json > 1:
        raise ValueError("--latex, --csv and --json exclude each other; choose one of them")
    if not latex + as_csv + as_json:
        return None
    from fedfactor.report import comparison

    def show(outcomes: Sequence[CellOutcome]) -> None:
        lines = comparison.lines(outcomes)
        if as_json:
            print(json.dumps([line.as_dict() for line in lines], indent=1))
        else:
            print((comparison.latex if latex else comparison.csv_text)(lines), end="")

    return show


def _check_engine(engine: str, workers: int, profile: bool) -> None:
    if engine not in ENGINES:
        raise ValueError(f"there is no engine {engine!r}; choose one of {', '.join(ENGINES)}")
    if workers and engine != "pool":
        raise ValueError(f"--workers needs --engine pool: the engine {engine} has no worker processes")
    if profile and engine.startswith("flower"):
        raise ValueError(f"--profile needs --engine inline or pool: it cannot see the processes of {engine}")


def _run_on_flower(
    engine: str, recipe: Recipe, where: Path, resume: bool, data_dir: Path | None, on_event: Callable[[Any], None]
) -> dict[str, Any]:
    from fedfactor.runs.flower.local import run_local

    simulated = engine == "flower-ray"
    return run_local(recipe, where, resume=resume, simulation=simulated, data_dir=data_dir, on_event=on_event)


def compare(
    recipe: RecipeFile,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, separated by commas: fedavg,fedpara. METHOD@NAME adds a variant of a method, with settings "
            "of its own: fedpara,fedpara@wide."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory of all runs, one METHOD/seed-N per run.")],
    seeds: Annotated[
        str,
        typer.Option(
            help="Seeds, separated by commas. Each is the seed of training and of the partition; --set "
            "partition.seed=0 gives all seeds the same partition."
        ),
    ] = "1,2,3",
    jobs: Annotated[int, typer.Option(help="Number of runs at once, each in its own process.", min=1)] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Override a key of the recipe: --set train.rounds=5, or for one method: --set fedpara:train.lr=0.1, "
            "--set fedpara@wide:method.gamma=0.5. Repeatable.",
        ),
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            help="Choose a key's value for each method on validation data: --tune train.lr=0.01,0.03,0.1, or for one "
            "method: --tune fedpara:method.gamma=0.1,0.5. Repeatable: several keys make a grid."
        ),
    ] = None,
    tune_rounds: Annotated[
        int | None, typer.Option(help="Rounds of each run of --tune. Default: the recipe's.", min=1)
    ] = None,
    tune_share: Annotated[
        float | None,
        typer.Option(
            help="Share of each client's training examples that --tune holds out as validation data. Default: the "
            "recipe's partition.validation_share, or 0.2."
        ),
    ] = None,
    small: Small = False,
    only: Annotated[
        str, typer.Option(help="Take methods' settings only from the cells of a sweep that match this pattern.")
    ] = "*",
    data_dir: DataDir = None,
    latex: Latex = False,
    as_csv: AsCsv = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Compare methods over seeds. Runs the missing cells and resumes interrupted ones."""
    from fedfactor.cli.screen import Progress
    from fedfactor.report import comparison
    from fedfactor.report import report as write_report
    from fedfactor.runs import compare as comparing
    from fedfactor.runs.tuning import Search

    print_table = _table_printer(latex, as_csv, as_json)
    chosen = numbers("--seeds", seeds, "1,2,3", int)
    if not tune and (tune_rounds is not None or tune_share is not None):
        raise ValueError("--tune-rounds and --tune-share need --tune, which says what to choose")
    # Progress goes to standard error, so that the table can be piped.
    try:
        with Progress(Console(stderr=True, emoji=False), quiet) as progress:
            outcomes = comparing.compare(
                read_recipe(recipe, small),
                listed(methods),
                chosen,
                out,
                search=Search(tune or (), tune_rounds, tune_share),
                settings=settings or [],
                only=only,
                where=str(recipe),
                jobs=jobs,
                data_dir=data_dir,
                on_start=lambda cell: progress.start(cell.name, cell.recipe.rounds.rounds),
            )
    except KeyboardInterrupt:
        complain("interrupted; run the same command again to resume")
        raise typer.Exit(130) from None
    if print_table:
        print_table(outcomes)
    else:
        console.print(comparison.table(comparison.lines(outcomes)))
    for outcome in outcomes:
        if outcome.failure:
            complain(f"{outcome.cell.name}: {outcome.failure}")
    done = [outcome.cell.directory for outcome in outcomes if not outcome.failure]
    missing = [package for package in ("plotly", "jinja2") if importlib.util.find_spec(package) is None]
    if done and missing:
        complain(f"the report needs the package {missing[0]}: {install_command('report')}")
    elif done:
        write_report(done, out / "report.html")
        Console(stderr=True, soft_wrap=True, emoji=False).print(
            f"report: {out / 'report.html'}", highlight=False, markup=False
        )
    if any(outcome.failure for outcome in outcomes):
        raise typer.Exit(1)
