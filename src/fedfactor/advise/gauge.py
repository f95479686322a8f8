"""Measure the network that a client would train, and its messages, through the method's own hooks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedfactor import cost
from fedfactor.advise.request import Request
from fedfactor.data.clients import FederatedData
from fedfactor.nn.frozen import without_values
from fedfactor.protocol.method import Method, form_of, forward_passes
from fedfactor.protocol.setup import cannot_tune
from fedfactor.runs.tasks import model_factory
from fedfactor.server.costs import message_lengths, training_bytes
from fedfactor.task import Task, like


@dataclass(frozen=True)
class Size:
    """Size and cost of a client's network and its messages; the same on every device."""

    parameters: int
    macs: float
    """Multiply-accumulates of one example's forward pass in training, composing included; NaN if not known."""
    activations: float
    """Bytes that the forward pass of a batch keeps for the backward pass; NaN if not known."""
    memory: float
    """Bytes of activations, weights, gradients, the optimizer's state and buffers; NaN if not known."""
    down: int
    """Bytes of the download per round."""
    up: int
    """Bytes of the upload per round."""


class Gauge:
    """Measures the networks that clients would train, each network once."""

    def __init__(self, request: Request) -> None:
        known = request.resolved
        self.training, self.optimizer, self.codec = known.training, known.optimizer, known.codec
        size = (self.training.batch_size, *request.shape)
        home = torch.empty(0, dtype=self.training.torch_dtype)
        self.batch = torch.ones(size, dtype=torch.int64) if request.tokens else like(torch.ones(size), home)
        table = known.tables["model"]
        factory = model_factory(table, request.classes, known.tune)
        described = FederatedData.without_examples(1, self.batch[0])
        self.task = Task(factory, described, tune=known.tune)
        self._sizes: dict[tuple[str, float], Size] = {}
        self._costs: dict[tuple[str, float], tuple[nn.Module, float, float]] = {}

    def build(self, width: float = 1.0) -> nn.Module:
        """Build the model on the meta device, without values."""
        try:
            with torch.device("meta"):
                return self.task.build(width)
        except (NotImplementedError, RuntimeError):  # the model computes with its initial values
            return without_values(self.task.build(width))

    def ready(self, method: Method, levels: Sequence[float]) -> Method:
        """Return the method bound to the task and these capacities, in its first form.

        Raises ValueError if the method refuses them.
        """
        untunable = self.task.tune is not None and method.untunable
        reason = cannot_tune(method) if untunable else method.refuses(self.optimizer, self.codec, self.training)
        if reason:
            raise ValueError(reason)
        return form_of(method.bind(self.task, sorted(levels, reverse=True)), 0)

    def size(self, method: Method, capacity: float) -> Size:
        """Measure the network for a capacity, and its messages."""
        key = repr(method), capacity
        if key not in self._sizes:
            network, _, activations = self.measured(method, capacity)
            macs = sum(
                times * self.measured(method, level)[1] / len(self.batch)
                for level, times in forward_passes(method, capacity).items()
            )
            parameters = sum(p.numel() for p in network.parameters())
            memory = training_bytes(network, self.training) + activations
            down, up = message_lengths(method, self.optimizer, self.codec, self.training, network, capacity)
            self._sizes[key] = Size(parameters, macs, activations, memory, down, up)
        return self._sizes[key]

    def measured(self, method: Method, capacity: float) -> tuple[nn.Module, float, float]:
        """Return the network for a capacity, and the operations and the bytes of activations of a training batch."""
        key = repr(method), capacity
        if key not in self._costs:
            network = method.network(self.build, capacity).to(self.training.torch_dtype).train()
            try:
                try:
                    counted = cost.measure(network, self.batch)
                except Exception:  # a model that looks at its numbers needs some
                    real = method.network(self.task.build, capacity).to(self.training.torch_dtype).train()
                    counted = cost.measure(real, self.batch)
                self._costs[key] = network, counted.macs, counted.activation_bytes
            except cost.Uncountable as error:
                unknown = "Operations, memory and the time of computation are not known, and their limits not checked"
                warnings.warn(f"{error}. {unknown}", stacklevel=2)
                self._costs[key] = network, math.nan, math.nan
        return self._costs[key]
