"""Federated learning of factorised models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedfactor.support.lazy import imported_on_use

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedfactor.data.clients import FederatedData
    from fedfactor.methods import create_method, list_methods
    from fedfactor.models import list_models
    from fedfactor.nn.adapt import Tune
    from fedfactor.protocol.settings import Capacities, Schedule
    from fedfactor.runs.open import load
    from fedfactor.runs.simulate import simulate
    from fedfactor.server.result import Result
    from fedfactor.task import Task

__all__ = [
    "Capacities",
    "FederatedData",
    "Result",
    "Schedule",
    "Task",
    "Tune",
    "create_method",
    "list_methods",
    "list_models",
    "load",
    "simulate",
]

_HOMES = {
    "Capacities": "fedfactor.protocol.settings",
    "FederatedData": "fedfactor.data.clients",
    "Result": "fedfactor.server.result",
    "Schedule": "fedfactor.protocol.settings",
    "Task": "fedfactor.task",
    "Tune": "fedfactor.nn.adapt",
    "create_method": "fedfactor.methods",
    "list_methods": "fedfactor.methods",
    "list_models": "fedfactor.models",
    "load": "fedfactor.runs.open",
    "simulate": "fedfactor.runs.simulate",
}

__getattr__ = imported_on_use(__name__, _HOMES)  # the command line starts without torch
