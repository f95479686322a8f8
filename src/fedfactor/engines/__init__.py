"""What carries jobs to clients and replies back: in this process, in others, or over a network."""

from fedfactor.engines.base import Done, Engine, Job
from fedfactor.engines.inline import Inline
from fedfactor.engines.pool import Pool

__all__ = ["Done", "Engine", "Inline", "Job", "Pool"]
