"""The task: losses and scores computed by hand, and models of one size."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

import fedfactor
from fedfactor.data.clients import FederatedData, Virtual
from fedfactor.task import Task
from tests.helpers.tiny import Tiny, data, odd, run


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
    torch.testing.assert_close(Task(Tiny, odd(), "binary").divergence(z, t, 2.0), two)
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
    scores = Task(model, odd(), "binary").evaluate(model, (one, torch.tensor([1, 1, 0])))
    assert scores["accuracy"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="kind must be"):
        Task(model, data(), "ranking")  # type: ignore[arg-type]


def test_language_is_measured_a_token() -> None:
    logits = torch.zeros(2, 3, 5)
    logits[:, 1] = 1.0
    model = nn.Identity()
    scores = Task(model, data(), "language").evaluate(model, (logits, torch.ones(2, 5, dtype=torch.long)))
    assert scores["accuracy"] == 1.0 and scores["examples"] == 10


def test_a_model_of_one_size_cannot_have_widths() -> None:
    with pytest.raises(ValueError, match="one size only"):
        run("heterofl", model=Tiny())


def test_a_width_with_a_default_above_one_is_the_factory_s_own() -> None:
    def network(width: int = 8) -> nn.Module:
        return nn.Linear(4, width)

    built = Task(network, data()).build()
    assert isinstance(built, nn.Linear) and built.out_features == 8
    shares = Task(lambda width=1.0: nn.Linear(4, round(8 * width)), data()).build(0.5)
    assert isinstance(shares, nn.Linear) and shares.out_features == 4


X, Y = torch.linspace(-1, 1, 240).reshape(60, 4), torch.arange(60) % 3
TEST = X[:20], Y[:20]


def spoilt(tensor: torch.Tensor, row: int, value: float) -> torch.Tensor:
    found = tensor.clone()
    found[row] = value
    return found


def ten(train: torch.Tensor, test: tuple[torch.Tensor, torch.Tensor], inputs: torch.Tensor = X) -> FederatedData:
    """Ten clients of six training examples, and of a tenth of the test examples, each."""
    own = list(torch.arange(len(test[1])).split(len(test[1]) // 10))
    return FederatedData((inputs, train), list(torch.arange(60).split(6)), test, own)


@pytest.mark.parametrize(
    ("outputs", "train", "test", "kind", "message"),
    [
        (1, X[:, :1], TEST, "classification", "must be labels of type torch.int64, got torch.float32 in the training"),
        (3, Y.float(), TEST, "classification", "must be labels of type torch.int64, got torch.float32 in the training"),
        (3, Y, (X, Y.float()), "classification", "must be labels of type torch.int64, got torch.float32 in the test"),
        (3, Y[:, None], TEST, "classification", r"returns N x 3 for targets of shape N x 1$"),
        (3, spoilt(Y, 7, -1), TEST, "language", r"not be negative, got -1 in row 7 of the training data \(client 1\)"),
        (3, Y, (X, spoilt(Y, 59, -2)), "language", r"not be negative, got -2 in row 59 of the test data \(client 9\)"),
        (3, spoilt(Y, 7, 3), TEST, "classification", r"less than 3, .*, got 3 in row 7 of the training .*client 1\)"),
        (3, Y, (X, spoilt(Y, 7, 9)), "language", r"less than 3, .*, got 9 in row 7 of the test data \(client 1\)"),
        (1, Y % 2, (X, spoilt(Y % 2, 8, 2)), "binary", r"0 or 1 in a binary task, got 2 in row 8 of the test data"),
        (2, Y % 2, (X, Y % 2), "binary", "a binary task needs one logit per target; the model returns N x 2 for"),
    ],
)
def test_targets_that_do_not_fit_are_refused(
    outputs: int, train: torch.Tensor, test: Any, kind: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fedfactor.simulate(nn.Linear(4, outputs), ten(train, test), kind=kind)


def test_inputs_that_are_not_finite_are_named_when_data_are_loaded() -> None:
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=r"input in row 31 of the training data \(client 5\) has NaN or infinite"):
            Task(nn.Linear(4, 3), ten(Y, TEST, spoilt(X, 31, value)))
    Task(nn.Linear(4, 3), ten(Y, TEST, torch.full_like(X, 3e38)))  # their sum is not finite, but they are
    unused = FederatedData((spoilt(X, 31, math.nan), spoilt(Y, 31, -1)), [torch.arange(30), torch.arange(32, 60)])
    assert fedfactor.simulate(nn.Linear(4, 3), unused, rounds=1).summary["totals"]["failures"] == 0
    virtual = FederatedData((spoilt(X, 31, math.nan), Y), Virtual(1000, lambda client: torch.tensor([client % 20])))
    with pytest.raises(ValueError, match="input in row 31 of the training data has NaN"):
        Task(nn.Linear(4, 3), virtual)


def test_a_test_row_of_nan_costs_a_wrong_answer_and_no_update() -> None:
    split = ten(Y, (spoilt(X[:20], 3, math.nan), torch.zeros(20, dtype=torch.long)))
    with pytest.warns(UserWarning, match=r"row 3 of the test data \(client 1\) has NaN or infinite entries"):
        result = fedfactor.simulate(nn.Linear(4, 3), split, rounds=2, lr=0.01)
    assert result.summary["totals"]["failures"] == 0
    last = result.history[-1]
    assert "loss" not in last["global"]["1"] and "loss" not in last["selected_after"]
    model = nn.Linear(4, 3)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.constant_(model.bias, 0.0)
    scores = result.federation.setup.task.evaluate(model, split.central)  # type: ignore[arg-type]
    assert scores == {"accuracy": 0.95, "examples": 20}, "class 0 is right everywhere but in the row of NaN"
    assert json.loads(json.dumps(result.history), parse_constant=pytest.fail) == result.history
    str(result)


def test_a_model_that_cannot_process_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="the model cannot process the data, whose inputs are 4: mat1 and mat2"):
        fedfactor.simulate(nn.Linear(5, 3), (X, Y))
    with pytest.raises(ValueError, match="the model must return a tensor, or an object with `logits`, got a tuple"):
        fedfactor.simulate(nn.LSTM(4, 3), (X, Y))


def test_the_evaluation_batch_is_a_setting() -> None:
    seen = []

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return super().forward(x)

    task = Task(Counting(4, 3), ten(Y, TEST), evaluation_batch=25)
    scores = task.evaluate(task.build(), (X, Y))
    assert seen == [25, 25, 10]
    assert scores["loss"] == pytest.approx(Task(nn.Identity(), ten(Y, TEST)).evaluate(task.build(), (X, Y))["loss"])
