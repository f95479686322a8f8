"""Engines run the clients' jobs: in this process, in worker processes, or on other machines."""

from fedfactor.engines.inline import Inline
from fedfactor.engines.pool import Pool
from fedfactor.protocol.engine import Done, Engine, Job

__all__ = ["Done", "Engine", "Inline", "Job", "Pool"]
