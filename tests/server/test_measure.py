"""What is measured: by whom, on what, and what the figures are made of."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fedfactor
from fedfactor.task import Task
from tests.helpers.tiny import data, run


def test_before_and_after_are_measured_on_the_clients_own_test_data() -> None:
    result = run(rounds=1, evaluate_clients="all")
    event = result.history[-1]
    federation = result.federation
    start = run(rounds=0).model
    own = data().own_test(event["cohort"][0])
    assert own is not None
    expected = federation.setup.task.evaluate(start, own)["accuracy"]
    assert event["selected_before"]["each"][0] == pytest.approx(expected)
    assert event["selected_after"]["clients"] == 3 and event["all"]["clients"] == 6
    everyone = [
        federation.setup.task.evaluate(result.client_model(c), data().own_test(c))["accuracy"] for c in range(6)
    ]  # type: ignore[arg-type]
    assert event["all"]["each"] == pytest.approx(everyone)


@pytest.mark.parametrize("method", ["pfedpara", "fedper", "local", "fedamp"])
def test_all_clients_are_measured_with_their_private_part(method: str) -> None:
    """Measured in the round, before its commit, is the same as measured afterwards from the store."""
    result = run(method, rounds=2, evaluate_clients="all")
    task = result.federation.setup.task
    again = [task.evaluate(result.client_model(c), data().own_test(c))["accuracy"] for c in range(6)]  # type: ignore[arg-type]
    assert result.history[-1]["all"]["each"] == pytest.approx(again)
    assert "global" not in result.history[-1]
    assert "private" in result.history[0]["protocol"]["global"]


def test_evaluations_happen_when_they_are_due() -> None:
    result = run(rounds=5, evaluate_every=2)
    assert [e["round"] for e in result.history if "global" in e] == [2, 4, 5]
    assert ["selected_after" in e for e in result.history[1:]] == [False, True, False, True, True]
    assert not any("selected_after" in e for e in run(evaluate_clients="none").history)


def test_costs_of_a_round() -> None:
    """Three clients of 40 examples, one epoch; bytes over links as FedPara counts them; energy only if given."""
    from fedfactor import cost

    result = run(rounds=1, joules_per_byte=1e-6, capacities={1.0: 1.0})
    event = result.history[-1]
    network = result.federation.setup.network(1.0).train()
    assert event["macs"] == cost.measure(network, data().train[0][:10]).macs / 10 * 120
    assert event["joules"] == pytest.approx(1e-6 * (event["bytes_down"] + event["bytes_up"]))
    size = (event["bytes_down"] + event["bytes_up"]) / 3
    slow, fast = event["link_seconds"]["2"], event["link_seconds"]["50"]
    assert slow - fast == pytest.approx(
        cost.link_seconds(size, 2, transfers=1) - cost.link_seconds(size, 50, transfers=1)
    )
    assert "joules" not in run(rounds=1).history[-1]


def test_language_has_perplexity_and_binary_has_a_threshold() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    model = nn.Identity()
    scores = Task(model, data(), "language").evaluate(model, (logits, torch.tensor([0, 0])))
    assert scores["accuracy"] == 0.5
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    one = torch.tensor([[0.3], [-0.2], [4.0]])
    scores = Task(model, data(), "binary").evaluate(model, (one, torch.tensor([1, 1, 0])))
    assert scores["accuracy"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="kind must be"):
        Task(model, data(), "regression")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_training_types(dtype: str) -> None:
    result = run("fedpara", dtype=dtype, rounds=1)
    assert result.summary["totals"]["failures"] == 0
    wanted = torch.float64 if dtype == "float64" else torch.float32  # the server keeps full precision
    assert {t.dtype for t in result.server.tensors.values() if t.is_floating_point()} == {wanted}


def test_the_result_prints_what_it_measured_and_how() -> None:
    text = str(run(rounds=1))
    for part in ("global", "selected_after", "own test data", "bytes up"):
        assert part in text


def test_language_is_measured_a_token() -> None:
    logits = torch.zeros(2, 3, 5)
    logits[:, 1] = 1.0
    model = nn.Identity()
    scores = Task(model, data(), "language").evaluate(model, (logits, torch.ones(2, 5, dtype=torch.long)))
    assert scores["accuracy"] == 1.0 and scores["examples"] == 10


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


def test_a_last_batch_of_one_joins_the_one_before() -> None:
    result = fedfactor.simulate(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)),
        (data().train[0][:42], data().train[1][:42]),
        clients=2,
        batch_size=20,
        rounds=1,
    )
    assert result.summary["totals"]["failures"] == 0
