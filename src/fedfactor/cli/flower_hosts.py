"""The commands for several machines: `fedfactor flower up`, `join`, `status`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

console = Console(soft_wrap=True)

SITE = Path("flower-site")


def _tell(text: str) -> None:
    console.print(text, markup=False, highlight=False)


@contextmanager
def _until_stopped(code: int, words: str) -> Iterator[None]:
    """Have Ctrl-C and SIGTERM end a command in order, with these words."""
    from fedfactor.runs.flower.local import stopping_on_sigterm

    try:
        with stopping_on_sigterm():
            yield
    except KeyboardInterrupt:
        _tell(words)
        raise typer.Exit(code) from None


def up(
    recipe: Annotated[Path, typer.Argument(help="A recipe file (TOML), or the name of a packaged recipe.")],
    out: Annotated[Path, typer.Option(help="Run directory; a run that is there is carried on.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address under which nodes reach this machine, for its certificate. Repeatable."),
    ] = None,
    site: Annotated[Path, typer.Option(help="Folder of certificates, keys and logs; kept for the next run.")] = SITE,
    listen: Annotated[str, typer.Option(help="0.0.0.0, or 127.0.0.1 for nodes on this machine.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="The one port that nodes must reach.")] = 8443,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the recipe: --set train.rounds=5. Repeatable.")
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option("--config", help="Set a key of the app: --config deadline=600. Repeatable.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are on this machine.")] = None,
) -> None:
    """Serve a run to nodes on other machines until it is done; start it again to carry on."""
    from fedfactor.cli.screen import Progress
    from fedfactor.runs import recipe as recipes
    from fedfactor.runs.catalog import find
    from fedfactor.runs.directory import check_claim, locked
    from fedfactor.runs.flower.hosts import Site
    from fedfactor.runs.flower.hosts import up as serve

    if not (site / "server.key").exists() and not host:
        raise ValueError("give the name or address under which nodes reach this machine: --host server.example.org")
    if listen not in ("0.0.0.0", "127.0.0.1"):
        raise ValueError(f"--listen is 0.0.0.0 or 127.0.0.1, got {listen}: a firewall says who may reach the port")
    tables = recipes.read(find(recipe))
    tables.setdefault("name", recipe.stem)
    if "sweep" in tables:
        raise ValueError(f"{recipe} is a sweep; `up` serves one run at a time: give a recipe without [sweep]")
    (cell,) = recipes.overridden_cells(tables, settings or []).values()
    resolved, given = recipes.resolve(cell, str(recipe)), recipes.override({}, config or [])
    if data_dir is not None:
        given["data-dir"] = str(data_dir.absolute())
    out = out.absolute()
    stopped = _until_stopped(130, "stopped; the same command carries on")
    with stopped, locked(out, "flower.lock"), Progress(console, quiet=False) as progress:
        check_claim(resolved, out, resume=True)
        place = Site(site, host or [], listen, port)
        try:
            _tell(f"nodes need {place.certificates.authority}; their public keys go to {place.keys.folder}")
            on_event = progress.start(resolved.tables["name"], resolved.rounds.rounds)
            serve(resolved, out, place, config=given, on_event=on_event, tell=_tell)
        finally:
            place.close()


def join(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the server is.")],
    client: Annotated[
        str, typer.Option(help="Which client this is: its number in the recipe's population, or a name of its own.")
    ],
    authority: Annotated[Path, typer.Option("--ca", help="ca.crt of the server's site.")] = Path("ca.crt"),
    key: Annotated[Path, typer.Option(help="This node's private key; made if it is not there.")] = Path("node.key"),
    state: Annotated[Path, typer.Option(help="Where private parts of models are kept.")] = Path("state"),
    config: Annotated[
        list[str] | None,
        typer.Option("--config", help="Set a key of the node: --config capacity=0.5. Repeatable."),
    ] = None,
) -> None:
    """Make this machine a client; leave it running."""
    from fedfactor.checks import near
    from fedfactor.runs.flower.hosts import join as take_part
    from fedfactor.runs.flower.node import KNOWN
    from fedfactor.runs.recipe import override

    node = {"client": int(client) if client.isdecimal() else client, "state-dir": str(state.absolute())}
    node.update(override({}, config or []))
    unknown = [name for name in node if name not in KNOWN]
    if unknown:
        raise ValueError(f"a node has no setting {unknown[0]!r}; {near(unknown[0], KNOWN)}there are {', '.join(KNOWN)}")
    if not re.fullmatch(r".+:\d+", server):
        raise ValueError(f"{server!r} is no HOST:PORT such as server.example.org:8443")
    with _until_stopped(0, "stopped"):
        take_part(server, authority, key, state.absolute() / "flower", node, _tell)


def status(
    out: Annotated[Path | None, typer.Option(help="Run directory, to tell how far the run is.")] = None,
    site: Annotated[Path, typer.Option(help="Folder of certificates, keys and logs.")] = SITE,
    port: Annotated[int, typer.Option(help="Port of the server.")] = 8443,
) -> None:
    """Say who may join, who is there and how far the run is; on the server's machine."""
    from fedfactor.engines.flower.control import Control
    from fedfactor.runs.directory import ENROLLED
    from fedfactor.runs.flower.local import committed

    if not (site / "ca.crt").exists():
        raise ValueError(f"there is no {site / 'ca.crt'}: --site is the folder that `fedfactor flower up` made")
    numbers = {}
    if out is not None and (out / ENROLLED).exists():
        clients = json.loads((out / ENROLLED).read_text())["clients"]
        numbers = {client["key"]: number for number, client in clients.items()}
    with Control(f"127.0.0.1:{port}", site / "ca.crt") as control:
        table = Table("node", "status", "client", "Flower's id")
        for node in control.nodes():
            client = numbers.get(hashlib.sha256(node.key).hexdigest(), "")
            table.add_row(node.name, node.status, client, str(node.id))
        console.print(table)
    if out is not None:
        done = "done" if (out / "summary.json").exists() else "not done yet"
        _tell(f"{out}: round {max(committed(out), 0)} is committed, {done}")
