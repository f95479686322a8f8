"""The ClientApp: what a SuperNode runs for every message."""

from __future__ import annotations

from fedfactor.flower.adapter import ClientApp
from fedfactor.flower.node import answer

app = ClientApp()
app.train()(answer)
app.query()(answer)
