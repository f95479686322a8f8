"""The ServerApp: what the SuperLink runs for a run."""

from __future__ import annotations

from fedfactor.engines.flower.adapter import Context, Grid, ServerApp
from fedfactor.runs.flower.server import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the app's configuration says."""
    serve(grid, context)
