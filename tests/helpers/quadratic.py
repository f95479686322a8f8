"""A problem for numbers computed by hand.

Two clients, f1 = (x - 1)^2 / 2 and f2 = (x + 1)^2, from x = 0 with rate 0.1 and two full-gradient steps each. Every
fault that other libraries were found to have in these places moves these numbers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fedfactor
from fedfactor.data.clients import FederatedData
from fedfactor.methods import Method
from fedfactor.optimizers import Optimizer
from fedfactor.protocol.context import Context
from fedfactor.protocol.message import decode
from fedfactor.server.result import Result


class Point(nn.Module):
    """A model that is one number."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([start]))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.x


@dataclass(frozen=True)
class Quadratic(Method):
    """Loss (a / 2)(x - b)^2 with a and b in the data."""

    def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        a, b = batch[0].unbind(1)
        return (a / 2 * (network.x - b) ** 2).mean()


def clients(*pairs: tuple[float, float], copies: tuple[int, ...] | None = None) -> FederatedData:
    copies = copies or (1,) * len(pairs)
    rows = [pair for pair, count in zip(pairs, copies, strict=True) for _ in range(count)]
    edges = torch.tensor((0, *copies)).cumsum(0)
    parts = [torch.arange(int(a), int(b)) for a, b in itertools.pairwise(edges)]
    return FederatedData((torch.tensor(rows, dtype=torch.float64), torch.zeros(len(rows), dtype=torch.long)), parts)


TWO = clients((1.0, 1.0), (2.0, -1.0))


def run(optimizer: Optimizer | str = "fedavg", rounds: int = 1, data: FederatedData = TWO, **settings: Any) -> Result:
    chosen: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 10,
        "lr": 0.1,
        "dtype": "float64",
        "evaluate_clients": "none",
    }
    chosen.update(settings)
    model = chosen.pop("model", Point())
    return fedfactor.simulate(
        model, data, method=chosen.pop("method", Quadratic()), optimizer=optimizer, rounds=rounds, **chosen
    )


def x(result: Result) -> float:
    return float(result.server.tensors["x"])


def state(result: Result, client: int) -> float:
    data = result.federation.store.read("client", client)
    assert data is not None
    return float(decode(data).tensors["optimizer/x"])
