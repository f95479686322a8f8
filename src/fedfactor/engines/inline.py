"""Engine that runs all clients one after another in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter

from fedfactor.client.work import work
from fedfactor.protocol.engine import Done, Job
from fedfactor.protocol.setup import Setup
from fedfactor.rng import one_thread


@dataclass(frozen=True)
class Inline:
    """The reference engine. It uses one torch thread, like worker processes, so that results are bit-identical."""

    def run(self, setup: Setup, jobs: Iterable[Job]) -> Iterator[Done]:
        """Run the jobs in order and yield one result per job."""
        with one_thread():
            for job in jobs:
                start = perf_counter()
                try:
                    reply, state = work(setup, job.message, job.state)
                except Exception as error:  # a failed client must not affect the others
                    yield Done(job.client, None, failure=f"{type(error).__name__}: {error}")
                else:
                    yield Done(job.client, reply, state, seconds=perf_counter() - start)
