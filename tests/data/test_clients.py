"""The data of clients: positions in shared arrays, as lists or as functions of the client."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedfactor
from fedfactor.data import clients
from fedfactor.data.clients import FederatedData, Virtual
from tests.helpers.tiny import data, lasting, run


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda x, y: fedfactor.simulate(nn.Linear(2, 2), (x, y[:3]), clients=2), "4 inputs but 3 targets"),
        (lambda x, y: fedfactor.simulate(nn.Linear(2, 2), (x.numpy(), y), clients=2), "must be two tensors"),
        (lambda x, y: fedfactor.simulate(nn.Linear(2, 2), (x, y), clients=9), "4 examples cannot be split over 9"),
        (lambda x, y: fedfactor.FederatedData((x, y), [torch.tensor([0, 9])]), "reaches from 0 to 9, there are 4"),
        (
            lambda x, y: fedfactor.FederatedData((x, y), [torch.tensor([], dtype=torch.long)]),
            "client 0 has no examples",
        ),
        (lambda x, y: fedfactor.FederatedData((x, y), []), "lists no client"),
    ],
)
def test_data_that_cannot_be_is_refused_at_once(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))  # type: ignore[operator]


def test_a_virtual_population_is_the_list_it_stands_for() -> None:
    real = data()
    virtual = Virtual(6, lambda client: real.train_of[client])
    assert real.test_of is not None
    tests = Virtual(6, lambda client: torch.arange(20) + 20 * client)
    same = FederatedData(real.train, virtual, real.central, tests)
    assert same.fingerprint == real.fingerprint and same.inputs_fingerprint == real.inputs_fingerprint
    assert lasting(run(data=same, evaluate_clients="all")) == lasting(run(data=real, evaluate_clients="all"))


def test_a_million_clients_cost_what_ten_do() -> None:
    """Nothing may ask every client for its examples."""
    real, asked = data(), set[int]()

    def positions(client: int) -> torch.Tensor:
        asked.add(client)
        return (torch.arange(20) + 7 * client) % len(real.train[1])

    many = FederatedData(real.train, Virtual(1_000_000, positions), real.central, Virtual(1_000_000, positions_of_test))
    result = run("fedper", data=many, cohort=10, rounds=2, evaluate_clients="all", evaluate_limit=5)
    assert len(asked) <= 16 + 20, "more than those looked at beforehand and those of two cohorts"
    assert result.history[-1]["all"]["clients"] == 5
    assert len(result.federation.store.clients("client")) == len({c for e in result.history[1:] for c in e["cohort"]})


def positions_of_test(client: int) -> torch.Tensor:
    return torch.arange(client % 10, client % 10 + 5)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (lambda client: torch.tensor([client]), "train_of of client 67 reaches from 67 to 67"),
        (lambda client: torch.arange(0), "client 0 has no examples"),
    ],
)
def test_a_few_clients_of_a_virtual_population_are_checked(positions: object, message: str) -> None:
    examples = torch.zeros(50, 2), torch.zeros(50, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        FederatedData(examples, Virtual(1000, positions))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lists no client"):
        FederatedData(examples, Virtual(0, positions))  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="no client 7 in a population of 5"):
        Virtual(5, lambda client: torch.arange(3))[7]


def fingerprint(inputs: torch.Tensor) -> str:
    parts = [torch.arange(len(inputs))]
    return FederatedData((inputs, torch.zeros(len(inputs), dtype=torch.int64)), parts).inputs_fingerprint


def test_every_input_counts() -> None:
    inputs = torch.randn(600, 3)
    whole = fingerprint(inputs)
    assert fingerprint(inputs.clone()) == whole == fingerprint(inputs.t().contiguous().t())
    for row in (0, 299, 599):
        other = inputs.clone()
        other[row, 1] += 1e-6
        assert fingerprint(other) != whole
    assert (
        len({whole, fingerprint(inputs.double()), fingerprint(inputs.view(600, 3, 1)), fingerprint(inputs[:599])}) == 4
    )


def test_large_inputs_are_sampled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "HASHED_BYTES", 100 * 12)
    inputs = torch.randn(600, 3)
    whole, other = fingerprint(inputs), inputs.clone()
    other[torch.arange(600) % 6 != 0] += 1
    assert fingerprint(other) == whole, "every sixth row is hashed"
    other[594] += 1
    assert fingerprint(other) != whole and fingerprint(inputs + 1) != whole


def test_inputs_that_share_the_memory_of_one_row_are_not_copied() -> None:
    rows = torch.zeros(3, 224, 224).expand(400, 3, 224, 224)
    assert fingerprint(rows) == fingerprint(rows)


def test_inputs_of_any_type() -> None:
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64):
        fingerprint(torch.ones(5, dtype=dtype))


def test_targets_of_one_example_in_any_layout_have_a_fingerprint() -> None:
    one = FederatedData((torch.ones(1, 2), torch.tensor(3).expand(1)), [torch.tensor([0])])
    assert one.fingerprint == FederatedData((torch.ones(1, 2), torch.tensor([3])), [torch.tensor([0])]).fingerprint
