"""The ServerApp, which the SuperLink runs once per run."""

from __future__ import annotations

from fedfactor.engines.flower.adapter import Context, Grid, ServerApp
from fedfactor.runs.flower.server import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Execute the recipe in the app's configuration."""
    serve(grid, context)
