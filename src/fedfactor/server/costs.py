"""Costs of a round: operations, bytes of plain FedAvg for comparison, seconds and energy of a link."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from fedfactor import cost
from fedfactor.data.batches import outline, zeros
from fedfactor.data.clients import count
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.message import Message, encode
from fedfactor.protocol.method import forward_passes
from fedfactor.protocol.setup import Setup
from fedfactor.rng import derive, seeded
from fedfactor.task import arguments, like

LINKS_MBPS = (2, 10, 50)


class Costs:
    """Counts of operations and bytes of a run's clients; each network is counted once."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._macs: dict[tuple[str, float], float] = {}

    def macs(self, capacity: float, round: int = 0) -> float:
        """Return the forward multiply-accumulates per training example of a client of this capacity in a round.

        NaN if they cannot be counted.
        """
        setup = self._setup.at(round)
        passes = forward_passes(setup.method, capacity).items()
        return sum(count * self._forward_macs(setup, level) for level, count in passes)

    def examples(self, capacity: float, samples: int, round: int) -> int:
        """Return how many examples a client of this capacity with so many samples processes in a round."""
        setup, training = self._setup.at(round), self._setup.training
        phases = setup.method.phases(setup.network(capacity), training.length)
        return sum(training.seen(samples, phase.epochs) for phase in phases) + training.own_norms * samples

    def _forward_macs(self, setup: Setup, capacity: float) -> float:
        """Return the operations of one forward pass per example, measured on a batch, which composes weights once."""
        key = repr(setup.method), capacity
        if key not in self._macs:
            network, data = setup.network(capacity).train(), setup.task.data
            size = setup.training.batch_size
            if data.described:  # one example stands for all
                batch = zeros(outline(data.batch(data.train, slice(1))), size)
            else:
                batch, size = data.batch(data.train, slice(size)), min(size, count(data.train))
            args, named = arguments(like(batch, next(iter(network.parameters()), torch.empty(0))))
            try:
                self._macs[key] = cost.measure(network, named or args).macs / size
            except Exception as error:
                # Clients whose data are elsewhere may well be able to process them.
                if not isinstance(error, cost.Uncountable) and not data.described:
                    raise
                warnings.warn(f"{error}. The run goes on, and the number of operations stays empty", stacklevel=2)
                self._macs[key] = math.nan
        return self._macs[key]

    def dense_bytes(self) -> int:
        """Return the bytes per round that a client of plain FedAvg would download and upload, headers included."""
        setup = self._setup
        with seeded(
            derive(setup.training.seed, "init")
        ):  # the values do not matter, but the global generator must not change
            tensors = tensors_of(setup.build())
        fields = {"client": 0, "round": 0, "capacity": 1.0, "lr": setup.training.lr, "test": False}
        message = Message("train", fields, {f"model/{name}": tensor for name, tensor in tensors.items()})
        return 2 * len(encode(message))


def link_costs(moved: int, busy: float, clients: int, joules_per_byte: float | None) -> dict[str, Any]:
    """Return the seconds of a round on slow links, and its energy if `joules_per_byte` is given."""
    seconds = {f"{mbps}": busy + cost.link_seconds(moved / clients, mbps, transfers=1) for mbps in LINKS_MBPS}
    return {"link_seconds": seconds} | ({} if joules_per_byte is None else {"joules": joules_per_byte * moved})
