"""Federated learning of factorised models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedfactor.run import load
    from fedfactor.simulation import Result, simulate
    from fedfactor.task import FederatedData, Task

__all__ = ["FederatedData", "Result", "Task", "load", "simulate"]


def __getattr__(name: str) -> Any:
    """Load the public names when they are first asked for, so that the command line starts without torch."""
    if name in ("Result", "simulate"):
        import fedfactor.simulation as home
    elif name == "load":
        import fedfactor.run as home  # type: ignore[no-redef]
    elif name in ("FederatedData", "Task"):
        import fedfactor.task as home  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module 'fedfactor' has no attribute {name!r}")
    return getattr(home, name)
