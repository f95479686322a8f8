"""The ClientApp, which a SuperNode runs for each message."""

from __future__ import annotations

from fedfactor.engines.flower.adapter import ClientApp
from fedfactor.runs.flower.node import answer

app = ClientApp()
app.train()(answer)
app.query()(answer)
