"""Engines run the clients' jobs: in this process, in worker processes, or on other machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedfactor.support.lazy import imported_on_use

if TYPE_CHECKING:
    from fedfactor.engines.inline import Inline
    from fedfactor.engines.pool import Pool
    from fedfactor.protocol.engine import Done, Engine, Job

__all__ = ["Done", "Engine", "Inline", "Job", "Pool"]

_HOMES = {
    "Done": "fedfactor.protocol.engine",
    "Engine": "fedfactor.protocol.engine",
    "Inline": "fedfactor.engines.inline",
    "Job": "fedfactor.protocol.engine",
    "Pool": "fedfactor.engines.pool",
}

__getattr__ = imported_on_use(__name__, _HOMES)  # the process that Flower starts per message must not import torch
