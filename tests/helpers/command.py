"""The command line: in this process, or as the words that start a process."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from fedfactor.cli import app


def fedfactor(*words: object, cwd: Path | None = None) -> Result:
    """Run `fedfactor` with these words in this process, in a folder."""
    with contextlib.chdir(cwd or Path.cwd()):
        return CliRunner().invoke(app, [str(word) for word in words])


def fedfactor_process(*words: object) -> list[str]:
    """Return the command that runs `fedfactor` with these words in a process of its own, to be killed or interrupted."""
    return [sys.executable, "-m", "fedfactor", *map(str, words)]
