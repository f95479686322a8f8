"""What carries jobs to clients and replies back: in this process, in others, or over a network."""

from fedfactor.engines.inline import Inline
from fedfactor.engines.pool import Pool
from fedfactor.protocol.engine import Done, Engine, Job

__all__ = ["Done", "Engine", "Inline", "Job", "Pool"]
