"""`fedfactor flower ...`: run recipes on Flower, across machines or on its simulation engine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedfactor.cli.common import DataDir, RecipeFile, Settings, console, read_recipe, resolved_cells, tell

app = typer.Typer(help="Run recipes on Flower: across machines, or on its simulation engine.", no_args_is_help=True)

SITE = Path("flower-site")
Config = Annotated[
    list[str] | None, typer.Option("--config", help="Set a key of the Flower app: --config deadline=60. Repeatable.")
]


@contextmanager
def _until_stopped(code: int, sentence: str) -> Iterator[None]:
    """End a command in order on Ctrl-C and SIGTERM, with this exit code and sentence."""
    from fedfactor.runs.flower.local import stopping_on_sigterm

    try:
        with stopping_on_sigterm():
            yield
    except KeyboardInterrupt:
        tell(sentence)
        raise typer.Exit(code) from None


@app.command()
def up(
    recipe: RecipeFile,
    out: Annotated[Path, typer.Option(help="Run directory. A run that it holds is resumed.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address under which nodes reach this machine, for its certificate. Repeatable."),
    ] = None,
    site: Annotated[Path, typer.Option(help="Folder of certificates, keys and logs; kept for the next run.")] = SITE,
    listen: Annotated[str, typer.Option(help="0.0.0.0, or 127.0.0.1 for nodes on this machine only.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="The only port that nodes must reach.")] = 8443,
    settings: Settings = None,
    config: Config = None,
    data_dir: DataDir = None,
) -> None:
    """Serve one run to nodes on other machines. Run the command again to resume."""
    from fedfactor.cli.screen import Progress
    from fedfactor.engines.flower.programs import DeploymentError
    from fedfactor.runs.directory import check_claim, locked
    from fedfactor.runs.flower.hosts import RunFailed, Site
    from fedfactor.runs.flower.hosts import up as serve
    from fedfactor.runs.recipe import override

    if not (site / "server.key").exists() and not host:
        raise ValueError("give the name or address under which nodes reach this machine: --host server.example.org")
    if listen not in ("0.0.0.0", "127.0.0.1"):
        raise ValueError(
            f"--listen must be 0.0.0.0 or 127.0.0.1, got {listen}; use a firewall to restrict who reaches the port"
        )
    tables = read_recipe(recipe)
    if "sweep" in tables:
        raise ValueError(f"{recipe} is a sweep, but `up` serves one run at a time: give a recipe without [sweep]")
    (resolved,) = resolved_cells(tables, recipe, settings or []).values()
    given = override({}, config or [])
    if data_dir is not None:
        given["data-dir"] = str(data_dir.absolute())
    out = out.absolute()
    stopped = _until_stopped(130, "stopped; run the same command again to resume")
    with stopped, locked(out, "flower.lock"), Progress(console, quiet=False) as progress:
        check_claim(resolved, out, resume=True)
        place = Site(site, host or [], listen, port)
        try:
            tell(f"nodes need {place.certificates.authority}; put their public keys into {place.keys.folder}")
            on_event = progress.start(resolved.tables["name"], resolved.rounds.rounds)
            serve(resolved, out, place, config=given, on_event=on_event, tell=tell)
        except (DeploymentError, RunFailed) as error:
            log = "superlink.log" if isinstance(error, DeploymentError) else "serverapp.log"
            raise type(error)(f"{error} (log: {place.folder / 'logs' / log})") from None
        finally:
            place.close()


@app.command()
def join(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the server.")],
    client: Annotated[
        str, typer.Option(help="Which client this node is: its number in the recipe's population, or a name.")
    ],
    authority: Annotated[Path, typer.Option("--ca", help="The file ca.crt of the server's site.")] = Path("ca.crt"),
    key: Annotated[Path, typer.Option(help="This node's private key; created if it is missing.")] = Path("node.key"),
    state: Annotated[Path, typer.Option(help="Folder of the model's private parts.")] = Path("state"),
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            help="Set a key of the node: capacity=0.5, data-options.root=/srv. Repeatable.",
        ),
    ] = None,
) -> None:
    """Make this machine a client. Leave the command running."""
    from fedfactor.runs.flower.device import check_config
    from fedfactor.runs.flower.hosts import join as take_part
    from fedfactor.runs.recipe import override

    node = {"client": int(client) if client.isdecimal() else client, "state-dir": str(state.absolute())}
    node.update(override({}, config or []))
    if isinstance(node.get("data-options"), dict):
        node["data-options"] = json.dumps(node["data-options"])  # Flower passes on plain values only
    check_config(node)
    if not (found := re.fullmatch(r".+:(\d+)", server)) or not 0 < int(found[1]) < 1 << 16:
        raise ValueError(f"the server's address must be HOST:PORT, such as server.example.org:8443, got {server!r}")
    with _until_stopped(0, "stopped"):
        take_part(server, authority, key, state.absolute() / "flower", node, tell)


@app.command()
def status(
    out: Annotated[Path | None, typer.Option(help="Run directory, to show how far the run is.")] = None,
    site: Annotated[Path, typer.Option(help="Folder of certificates, keys and logs.")] = SITE,
    port: Annotated[int, typer.Option(help="Port of the server.")] = 8443,
) -> None:
    """Show which nodes may join, which are online and how far the run is. Works on the server's machine."""
    from fedfactor.engines.flower.control import Control
    from fedfactor.runs.directory import ENROLLED, committed, lacking, left_out

    if not (site / "ca.crt").exists():
        raise ValueError(f"{site / 'ca.crt'} does not exist: --site must be the folder that `fedfactor flower up` made")
    numbers, excluded = {}, [] if out is None else left_out(out)
    if out is not None and (out / ENROLLED).exists():
        clients = json.loads((out / ENROLLED).read_text())["clients"]
        numbers = {client["key"]: number for number, client in clients.items()}
    with Control(f"127.0.0.1:{port}", site / "ca.crt") as control:
        table = Table("node", "status", "client", "Flower's id")
        for node in control.nodes():
            client = numbers.get(hashlib.sha256(node.key).hexdigest(), "")
            note = ", left out" if client and int(client) in excluded else ""
            table.add_row(node.name, node.status, f"{client}{note}", str(node.id))
        console.print(table)
    if out is not None:
        done = "finished" if (out / "summary.json").exists() else "not finished"
        tell(f"{out}: round {max(committed(out), 0)} is committed, {done}")
        if excluded:
            tell(f"clients left out because of invalid replies: {', '.join(map(str, excluded))}")
        if missed := lacking(out):
            tell(f"clients without the last model: {', '.join(map(str, missed))}")


@app.command("app")
def write(
    recipe: RecipeFile,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write, for `flwr run DIR`.")],
    settings: Settings = None,
    config: Config = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Run directory on the ServerApp's host. Default: runs/NAME in this folder.")
    ] = None,
    only: Annotated[str, typer.Option(help="The cell of a sweep whose name matches this pattern.")] = "*",
) -> None:
    """Write a folder for `flwr run`. fedfactor must be installed on every host."""
    from fedfactor.runs.flower.app import write_app
    from fedfactor.runs.recipe import override

    tables = read_recipe(recipe)
    cells = resolved_cells(tables, recipe, settings or [], only)
    if len(cells) != 1:
        raise ValueError(
            f"an app holds one recipe, but {len(cells)} cells of {recipe} match {only!r}: {', '.join(cells)}; "
            "choose one with --only"
        )
    ((name, resolved),) = cells.items()
    where = run_dir or Path("runs") / resolved.tables["name"] / (name if "sweep" in tables else "")
    write_app(resolved, folder, where, config=override({}, config or []))
    tell(f"next: flwr run {folder}; it writes {where.absolute()} on the ServerApp's host")
