"""Costs of a round: operations, memory and bytes of clients, bytes of plain FedAvg, seconds and energy of a link."""

from __future__ import annotations

import math
import time
import warnings
from typing import Any

import torch
from torch import nn

from fedfactor import cost
from fedfactor.client.descent import state_tensors
from fedfactor.data.batches import filled, outline
from fedfactor.data.clients import count
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.coding import code_down, code_up, prefixed
from fedfactor.protocol.message import Encoder, Message, encode
from fedfactor.protocol.method import Method, Participant, fixed_names, forward_passes, shared_names
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.settings import Training
from fedfactor.protocol.setup import Setup
from fedfactor.rng import derive, one_thread, seeded, torch_rng
from fedfactor.task import arguments, like

LINKS_MBPS = (2, 10, 50)


class Costs:
    """Counts of operations and bytes of a run's clients; each network is counted once."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        # By the form of the method, which is one object per setup, and the capacity.
        self._macs: dict[tuple[int, float], float] = {}
        self._epochs: dict[tuple[int, float], list[float]] = {}
        self._counted: dict[tuple[int, float], tuple[float, float]] = {}
        self._lengths: dict[tuple[int, float], tuple[int, int]] = {}

    def macs(self, capacity: float, round: int = 0) -> float:
        """Return the forward multiply-accumulates per training example of a client of this capacity in a round.

        NaN if they cannot be counted.
        """
        setup = self._setup.at(round)
        key = id(setup), capacity
        if key not in self._macs:
            passes = forward_passes(setup.method, capacity).items()
            self._macs[key] = sum(count * self._forward(setup, level)[0] for level, count in passes)
        return self._macs[key]

    def examples(self, capacity: float, samples: int, round: int) -> int:
        """Return how many examples a client of this capacity with so many samples processes in a round."""
        setup, training = self._setup.at(round), self._setup.training
        key = id(setup), capacity
        if key not in self._epochs:
            phases = setup.method.phases(setup.network(capacity), training.length)
            self._epochs[key] = [phase.epochs for phase in phases]
        return sum(training.seen(samples, epochs) for epochs in self._epochs[key]) + training.own_norms * samples

    def training_macs(self, who: Participant) -> float:
        """Return the multiply-accumulates of a client in its round: forward and backward passes over its examples."""
        samples = len(self._setup.task.data.train_of[who.client])
        forward_only = self._setup.training.own_norms * samples
        trained = self.examples(who.capacity, samples, who.round) - forward_only
        return (cost.TRAINING * trained + forward_only) * self.macs(who.capacity, who.round)

    def memory(self, capacity: float, round: int = 0) -> float:
        """Return the bytes that a client of this capacity needs to train; NaN if they cannot be counted."""
        setup = self._setup.at(round)
        return training_bytes(setup.network(capacity), setup.training) + self._forward(setup, capacity)[1]

    def lengths(self, capacity: float, round: int = 0) -> tuple[int, int]:
        """Return the lengths of a client's download and upload in a round; see `message_lengths`."""
        setup = self._setup.at(round)
        key = id(setup), capacity
        if key not in self._lengths:
            parts = setup.method, setup.optimizer, setup.codec, setup.training
            self._lengths[key] = message_lengths(*parts, setup.network(capacity), capacity)
        return self._lengths[key]

    def _forward(self, setup: Setup, capacity: float) -> tuple[float, float]:
        """Return the operations per example and the activations' bytes of one forward pass of a training batch.

        Operations are measured on a batch, which composes weights once.
        """
        key = id(setup), capacity
        if key not in self._counted:
            network, data = setup.network(capacity).train(), setup.task.data
            size = setup.training.batch_size
            if data.described:  # one example stands for all
                batch = filled(outline(data.batch(data.train, slice(1))), size)
            else:
                batch, size = data.batch(data.train, slice(size)), min(size, count(data.train))
            args, named = arguments(like(batch, next(iter(network.parameters()), torch.empty(0))))
            try:
                found = cost.measure(network, named or args)
                self._counted[key] = found.macs / size, found.activation_bytes
            except Exception as error:
                # Clients whose data are elsewhere may well be able to process them.
                if not isinstance(error, cost.Uncountable) and not data.described:
                    raise
                warnings.warn(f"{error}. The run goes on, and the number of operations stays empty", stacklevel=2)
                self._counted[key] = math.nan, math.nan
        return self._counted[key]

    def dense_bytes(self) -> int:
        """Return the bytes per round that a client of plain FedAvg would download and upload, headers included."""
        setup = self._setup
        with seeded(
            derive(setup.training.seed, "init")
        ):  # the values do not matter, but the global generator must not change
            tensors = tensors_of(setup.build())
        fields = {"client": 0, "round": 0, "capacity": 1.0, "lr": setup.training.lr, "test": False}
        return 2 * sum(map(len, Encoder(prefixed("model", tensors)).parts("train", fields)))


def link_costs(moved: int, busy: float, clients: int, joules_per_byte: float | None) -> dict[str, Any]:
    """Return the seconds of a round on slow links, and its energy if `joules_per_byte` is given."""
    seconds = {f"{mbps}": busy + cost.link_seconds(moved / max(clients, 1), mbps, transfers=1) for mbps in LINKS_MBPS}
    return {"link_seconds": seconds} | ({} if joules_per_byte is None else {"joules": joules_per_byte * moved})


def training_bytes(network: nn.Module, training: Training) -> int:
    """Return the bytes of weights, buffers, gradients and the optimizer's state: all of training but activations."""
    held = sum(t.nbytes for t in [*network.parameters(), *network.buffers()])
    trained = sum(p.nbytes for p in network.parameters() if p.requires_grad)
    return held + (1 + state_tensors(training)) * trained


def message_lengths(
    method: Method, optimizer: Optimizer, codec: Codec, training: Training, network: nn.Module, capacity: float
) -> tuple[int, int]:
    """Return the lengths of a download and an upload, encoded as in a round but with zeros.

    No codec's length depends on the values. The texts of real messages may be some 100 bytes longer or shorter.
    """
    shapes, shared = tensors_of(network), shared_names(method, network)
    tensors: Tensors = {name: torch.zeros(shapes[name].shape, dtype=shapes[name].dtype) for name in shared}
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    start = optimizer.start({name: tensor for name, tensor in tensors.items() if name in trained})
    extras = optimizer.broadcast(start)
    coded_down = code_down(codec, trained, tensors)
    sent = {name: tensor for name, tensor in tensors.items() if name not in fixed_names(network)}
    coded_up, _ = code_up(codec, trained, sent, sent, {}, torch_rng(0, "plan"))
    job = {"client": 0, "round": 0, "capacity": capacity, "lr": training.lr, "test": False}
    reply = {"client": 0, "round": 0, "capacity": capacity, "samples": 1000, "loss": 1 / 3, "steps": 10}
    down = Message("train", job, prefixed("model", coded_down) | prefixed("extra", extras))
    up = Message("trained", reply, prefixed("model", coded_up) | prefixed("extra", optimizer.expected(extras)))
    return len(encode(down)), len(encode(up))


def training_speed(setup: Setup, seconds: float = 1.0) -> float:
    """Measure the multiply-accumulates per second of this machine in training the full network on one thread."""
    network, task, training = setup.network(1.0).train(), setup.task, setup.training
    size = min(training.batch_size, count(task.data.train))
    batch = like(task.data.batch(task.data.train, slice(size)), next(network.parameters()))

    def step() -> None:
        with training.autocast():
            loss = task.loss(task.outputs(network, batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]

    with seeded(0), one_thread():
        step()  # allocates memory
        steps, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds or not steps:
            step()
            steps += 1
    network.zero_grad()
    return cost.TRAINING * Costs(setup).macs(1.0) * size * steps / elapsed
