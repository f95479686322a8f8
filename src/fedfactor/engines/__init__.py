"""Engines run the clients' jobs: in this process, in worker processes, or on other machines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the process that Flower starts per message must not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedfactor.engines' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
