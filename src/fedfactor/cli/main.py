"""The commands put together. An error is one red sentence and exit code 2; `--debug` shows the traceback."""

from __future__ import annotations

import warnings
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fedfactor import __version__
from fedfactor.cli.common import complain, tell
from fedfactor.cli.flower import app as flower_app
from fedfactor.cli.new import new
from fedfactor.cli.recipes import app as recipes_app
from fedfactor.cli.run import compare, run
from fedfactor.cli.show import data_app, methods, report, tables
from fedfactor.cli.tools import audit, export, plan


class Commands(TyperGroup):
    """The group of all commands: exceptions of a command become a sentence for its user."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _warn
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # the command line's own ways to end; a closed pipe, as after `| head`, needs no message
        except Exception as error:
            if ctx.params["debug"]:
                raise
            complain(str(error), type(error).__name__)
            raise typer.Exit(2) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def _warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    complain(str(message), category.__name__)  # the line of code that Python shows means nothing to a user


def _version(wanted: bool) -> None:
    if wanted:
        tell(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning of factorised models."""


for command in (run, compare, report, plan, export, audit, new, methods, tables):
    app.command()(command)
app.add_typer(recipes_app, name="recipes")
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")


def main() -> None:
    """Run the command line, and exit."""
    app()
