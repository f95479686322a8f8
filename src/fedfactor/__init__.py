"""Federated learning of factorised models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedfactor.data.clients import FederatedData
    from fedfactor.methods import create_method, list_methods
    from fedfactor.models import list_models
    from fedfactor.nn.adapt import Tune
    from fedfactor.runs.open import load
    from fedfactor.runs.simulate import simulate
    from fedfactor.server.result import Result
    from fedfactor.task import Task

__all__ = [
    "FederatedData",
    "Result",
    "Task",
    "Tune",
    "create_method",
    "list_methods",
    "list_models",
    "load",
    "simulate",
]

_HOMES = {
    "FederatedData": "fedfactor.data.clients",
    "Result": "fedfactor.server.result",
    "Task": "fedfactor.task",
    "Tune": "fedfactor.nn.adapt",
    "create_method": "fedfactor.methods",
    "list_methods": "fedfactor.methods",
    "list_models": "fedfactor.models",
    "load": "fedfactor.runs.open",
    "simulate": "fedfactor.runs.simulate",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedfactor' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
