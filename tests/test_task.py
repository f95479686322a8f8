"""What is minimised: hand-computed losses."""

from __future__ import annotations

import pytest
import torch

from fedfactor.data.clients import FederatedData, Virtual
from fedfactor.task import Task
from tests.helpers.tiny import Tiny, data, run


def test_divergence_from_a_teacher_by_hand() -> None:
    """Logits (1, 0) against a teacher's (2, 0) at temperature 3: 9 KL with KL = .0128543."""
    outputs = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[2.0, 0.0]], dtype=torch.float64, requires_grad=True)
    apart = Task(Tiny, data()).divergence(outputs, teacher, 3.0)
    assert float(apart.detach()) == pytest.approx(9 * 0.0128543, rel=1e-5)
    apart.backward()
    # d/do = T (softmax(o / T) - softmax(t / T)) = 3 (.582570 - .660757)
    assert outputs.grad is not None and outputs.grad[0].tolist() == pytest.approx([-0.234560, 0.234560], abs=1e-5)
    assert teacher.grad is None


def test_one_logit_diverges_like_the_two_classes_it_stands_for() -> None:
    z, t = torch.tensor([[0.3], [-1.0]]), torch.tensor([[1.2], [0.4]])
    two = Task(Tiny, data()).divergence(torch.cat([torch.zeros(2, 1), z], 1), torch.cat([torch.zeros(2, 1), t], 1), 2.0)
    torch.testing.assert_close(Task(Tiny, data(), "binary").divergence(z, t, 2.0), two)
    assert two > 0


def test_a_batch_of_token_sequences_counts_every_position_once() -> None:
    """Classes lie along axis 1, as torch's cross entropy has them."""
    outputs, teacher = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    task = Task(Tiny, data(), "language")
    flat = task.divergence(outputs.transpose(1, 2).reshape(6, 5), teacher.transpose(1, 2).reshape(6, 5))
    torch.testing.assert_close(task.divergence(outputs, teacher), flat)


def test_a_virtual_population_is_the_list_it_stands_for() -> None:
    real = data()
    virtual = Virtual(6, lambda client: real.train_of[client])
    assert real.test_of is not None
    tests = Virtual(6, lambda client: torch.arange(20) + 20 * client)
    same = FederatedData(real.train, virtual, real.central, tests)
    assert same.fingerprint == real.fingerprint
    assert run(data=same, evaluate_clients="all").summary == run(data=real, evaluate_clients="all").summary


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
