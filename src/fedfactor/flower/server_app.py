"""The ServerApp: what the SuperLink runs for a run."""

from __future__ import annotations

from fedfactor.flower.adapter import Context, Grid, ServerApp
from fedfactor.flower.server import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the app's configuration says."""
    serve(grid, context)
