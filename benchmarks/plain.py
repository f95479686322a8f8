"""Federated averaging as a plain PyTorch loop, the fastest that a careful person would write by hand.

No messages, no checks, no state, no failures, nothing measured: workers inherit the data, share the weights' memory,
take the next client from a counter and add what they trained to a sum of their own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workloads import Workload


class Loop:
    """Rounds of federated averaging in worker processes, or, with none, in this one."""

    def __init__(self, work: Workload, data: tuple[Tensor, Tensor], workers: int, *, fused: bool) -> None:
        self._work, self._data, self._fused, self._round = work, data, fused, 0
        self._model = work.model()
        self._weights = _shared(self._model)
        self._sums = [_shared(self._model) for _ in range(max(workers, 1))]
        context = multiprocessing.get_context("fork")
        self._cohort = torch.zeros(work.cohort, dtype=torch.int64).share_memory_()
        self._next: Any = context.Value("i", 0)
        self._pipes: list[Connection] = []
        for number in range(workers):
            ours, theirs = context.Pipe()
            context.Process(target=self._serve, args=(theirs, number), daemon=True).start()
            self._pipes.append(ours)

    def round(self) -> None:
        """Train one cohort and take the mean."""
        rng = torch.Generator().manual_seed(self._round)
        self._cohort.copy_(torch.randperm(self._work.users, generator=rng)[: self._work.cohort])
        self._next.value = 0
        self._round += 1
        for pipe in self._pipes:
            pipe.send("go")
        if not self._pipes:
            self._part(0)
        for pipe in self._pipes:
            pipe.recv()
        torch._foreach_copy_(self._weights, self._sums[0])
        for more in self._sums[1:]:
            torch._foreach_add_(self._weights, more)

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.close()

    def _serve(self, pipe: Connection, number: int) -> None:
        torch.set_num_threads(1)
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            self._part(number)
            pipe.send("done")

    def _part(self, number: int) -> None:
        """Train clients until none is left, adding each to this worker's sum."""
        torch._foreach_zero_(self._sums[number])
        parameters = [parameter.data for parameter in self._model.parameters()]
        while (client := self._take()) is not None:
            torch._foreach_copy_(parameters, self._weights)
            self._train(client)
            torch._foreach_add_(self._sums[number], parameters, alpha=1 / self._work.cohort)

    def _take(self) -> int | None:
        with self._next.get_lock():
            place = self._next.value
            self._next.value += 1
        return int(self._cohort[place]) if place < self._work.cohort else None

    def _train(self, client: int) -> None:
        work, (inputs, labels) = self._work, self._data
        optimizer = torch.optim.SGD(self._model.parameters(), lr=work.lr, **({"fused": True} if self._fused else {}))
        rows = work.rows(client)
        for where in rows[torch.randperm(work.samples)].split(work.batch):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self._model(inputs[where]), labels[where])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def _shared(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone().share_memory_() for parameter in model.parameters()]


@contextmanager
def loops(
    work: Workload, data: tuple[Tensor, Tensor], variants: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Loop]]:
    """Open one loop a variant, and end their workers afterwards."""
    found = {name: Loop(work, data, **options) for name, options in variants.items()}
    try:
        yield found
    finally:
        for loop in found.values():
            loop.close()
