"""Measure the network that a client would train, and its messages, through the method's own hooks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedfactor import cost
from fedfactor.advise.request import Request
from fedfactor.client.descent import state_tensors
from fedfactor.data.clients import FederatedData
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.coding import code_down, code_up
from fedfactor.protocol.message import Message, encode
from fedfactor.protocol.method import Method, fixed_names, form_of, forward_passes, shared_names
from fedfactor.protocol.plan import Tensors
from fedfactor.rng import torch_rng
from fedfactor.runs.tasks import model_factory
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
        factory, described = model_factory(table, request.classes), FederatedData.without_examples(1, self.batch[0])
        self.task = Task(factory, described, tune=known.tune)
        self.state_tensors = state_tensors(self.training)
        self._sizes: dict[tuple[str, float], Size] = {}
        self._costs: dict[tuple[str, float], tuple[nn.Module, float, float]] = {}

    def build(self, width: float = 1.0) -> nn.Module:
        """Build the model on the meta device, without values."""
        try:
            with torch.device("meta"):
                return self.task.build(width)
        except (NotImplementedError, RuntimeError):  # the model computes with its initial values
            return self.task.build(width).to("meta")

    def ready(self, method: Method, levels: Sequence[float]) -> Method:
        """Return the method bound to the task and these capacities, in its first form.

        Raises ValueError if the method refuses them.
        """
        reason = method.refuses(self.optimizer, self.codec, self.training)
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
            held = sum(t.nbytes for t in [*network.parameters(), *network.buffers()])
            trained = sum(p.nbytes for p in network.parameters() if p.requires_grad)
            memory = held + (1 + self.state_tensors) * trained + activations
            down, up = self._messages(method, network, capacity)
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

    def _messages(self, method: Method, network: nn.Module, capacity: float) -> tuple[int, int]:
        """Return the lengths of a download and an upload, encoded as in a round but with zeros."""
        shapes, shared, fixed = tensors_of(network), shared_names(method, network), fixed_names(network)
        tensors: Tensors = {name: torch.zeros(shapes[name].shape, dtype=shapes[name].dtype) for name in shared}
        trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
        job = {"client": 0, "round": 0, "capacity": capacity, "lr": self.training.lr, "test": False}
        coded_down = code_down(self.codec, trained, tensors)
        rng = torch_rng(0, "plan")
        up = {name: tensor for name, tensor in tensors.items() if name not in fixed}
        coded_up, _ = code_up(self.codec, trained, up, up, {}, rng)
        reply = {"client": 0, "round": 0, "capacity": capacity, "samples": 1000, "loss": 1 / 3, "steps": 10}
        return _length("train", job, coded_down), _length("trained", reply, coded_up)


def _length(kind: str, fields: dict[str, Any], tensors: Tensors) -> int:
    return len(encode(Message(kind, fields, {f"model/{name}": tensor for name, tensor in tensors.items()})))
