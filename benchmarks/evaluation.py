"""Seconds to measure the server's model on 3,200 pictures with two workers, over a plain loop in two processes."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

from benchmarks.harness import emit, medians
from benchmarks.workloads import CIFAR
from fedfactor import simulate
from fedfactor.data.clients import FederatedData
from fedfactor.engines import Pool
from fedfactor.server.measure import measure_global
from fedfactor.task import EVALUATION_BATCH

PICTURES = 3_200


class Loop:
    """Evaluation in two processes, which inherit model and data and share the weights' memory."""

    def __init__(self, model: nn.Module, data: tuple[Tensor, Tensor]) -> None:
        self._model, self._data = model.share_memory().eval(), data
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        for number in range(2):
            ours, theirs = context.Pipe()
            context.Process(target=self._serve, args=(theirs, number), daemon=True).start()
            self._pipes.append(ours)

    def run(self) -> float:
        """Return the accuracy."""
        for pipe in self._pipes:
            pipe.send("go")
        sums = [pipe.recv() for pipe in self._pipes]
        return float(sum(correct for correct, _ in sums)) / PICTURES

    def _serve(self, pipe: Connection, number: int) -> None:
        torch.set_num_threads(1)
        inputs, labels = self._data
        while pipe.recv():
            correct, loss = 0, 0.0
            with torch.inference_mode():
                for first in range(number * EVALUATION_BATCH, PICTURES, 2 * EVALUATION_BATCH):
                    part = slice(first, first + EVALUATION_BATCH)
                    outputs = self._model(inputs[part])
                    correct += int((outputs.argmax(1) == labels[part]).sum())
                    loss += float(nn.functional.cross_entropy(outputs, labels[part], reduction="sum"))
            pipe.send((correct, loss))


def run() -> None:
    work = replace(CIFAR, users=1, samples=PICTURES, cohort=1)
    data = work.data()
    federated = FederatedData(data, [work.rows(0)], data)
    with Pool(2) as pool:
        setup = simulate(work.build, federated, rounds=0, cohort=1, engine=pool).federation.setup
        model = work.model()
        loop = Loop(model, data)
        ours = measure_global(pool, setup, 1, {1.0: model})["1"]["accuracy"]
        if abs(ours - loop.run()) > 1e-9:
            raise RuntimeError("the two evaluations differ")
        found = medians(
            {"pool": lambda: measure_global(pool, setup, 1, {1.0: model}), "plain": loop.run}, repeats=9, warmup=2
        )
    emit("evaluation_2_workers_over_plain", found["pool"] / found["plain"], "ratio", "<= 1.1")
