"""FedProx by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from fedfactor.methods import Method
from fedfactor.optimizers import FedProx
from fedfactor.protocol.context import Context
from tests.helpers.quadratic import run, x


def test_fedprox_has_a_squared_term_with_a_gradient() -> None:
    assert x(run(FedProx(mu=1.0))) == pytest.approx(-0.08)
    assert x(run(FedProx(mu=0.0))) == x(run())


def test_fedprox_holds_rows_of_a_table_to_where_they_started() -> None:
    """Rows 0 and 1 of an embedding, loss row 0 - row 1 with a gradient of (1, -1): steps of -.1 (g + mu (w - w0)).

    w0 - .1, then w0 - .1 - .1 (1 - .1) = w0 - .19; an anchor that moved along would give w0 - .2.
    """

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 1)
            self.table.weight = nn.Parameter(torch.tensor([[0.5], [0.25], [4.0]]))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.table(torch.tensor([0, 1]))

    @dataclass(frozen=True)
    class Difference(Method):
        def objective(self, network: nn.Module, batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
            first, second = network(batch[0]).flatten()
            return first - second

    result = run(FedProx(mu=1.0), model=Rows(), method=Difference())
    assert result.server.tensors["table.weight"].flatten().tolist() == pytest.approx([0.31, 0.44, 4.0])
