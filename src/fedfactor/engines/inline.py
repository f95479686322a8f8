"""All clients one after another in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch

from fedfactor.client.work import work
from fedfactor.protocol.engine import Done, Job
from fedfactor.protocol.setup import Setup


@dataclass(frozen=True)
class Inline:
    """The reference engine: one torch thread, so that its bits are those of any worker process."""

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Work the jobs off in order."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for job in jobs:
                start = perf_counter()
                try:
                    reply, state = work(setup, job.message, job.state)
                except Exception as error:  # a client's failure costs its own update only
                    yield Done(job.client, None, failure=f"{type(error).__name__}: {error}")
                else:
                    yield Done(job.client, reply, state, seconds=perf_counter() - start)
        finally:
            torch.set_num_threads(threads)
