"""The task: losses and scores computed by hand, and models of one size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

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


def test_language_is_measured_a_token() -> None:
    logits = torch.zeros(2, 3, 5)
    logits[:, 1] = 1.0
    model = nn.Identity()
    scores = Task(model, data(), "language").evaluate(model, (logits, torch.ones(2, 5, dtype=torch.long)))
    assert scores["accuracy"] == 1.0 and scores["examples"] == 10


def test_a_model_of_one_size_cannot_have_widths() -> None:
    with pytest.raises(ValueError, match="one size only"):
        run("heterofl", model=Tiny())
