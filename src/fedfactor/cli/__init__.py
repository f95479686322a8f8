"""The command line. Errors are one red sentence and exit code 2; `--debug` shows where they come from."""

from fedfactor.cli.main import app, main

__all__ = ["app", "main"]
