"""The objective: built-in kinds, losses of the user's own and of the model, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fedfactor
from fedfactor.data.clients import FederatedData
from fedfactor.data.records import Records
from fedfactor.methods import FLANC, FedHM, FedRoD, FjORD, HeteroFL, PFedSD
from fedfactor.protocol.method import Method
from fedfactor.protocol.settings import Training
from fedfactor.protocol.setup import Setup
from fedfactor.registry import create
from fedfactor.task import Task, logits_of
from tests.helpers.sequences import Bag, Output, datasets, doubled, padded
from tests.helpers.tiny import Tiny, odd, run

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([1.0, -2.0, 0.5, 0.0])


def regression() -> FederatedData:
    return FederatedData((X, Y), list(torch.arange(40).split(10)))


def test_a_regression_learns_by_mean_squared_error() -> None:
    task = Task(nn.Linear(4, 1), regression(), "regression")
    outputs = X[:5, :1]
    assert task.loss(outputs, (X[:5], Y[:5])) == F.mse_loss(outputs[:, 0], Y[:5])
    result = fedfactor.simulate(nn.Linear(4, 1), (X, Y), kind="regression", clients=4, rounds=20, epochs=3)
    assert result.history[-1]["loss"] < 0.01
    assert result.federation.setup.task.evaluate(result.model, (X, Y))["loss"] < 0.01


def test_an_evaluation_weights_batches_by_their_examples() -> None:
    task = Task(nn.Identity(), regression(), evaluation_batch=3, objective=lambda outputs, batch: outputs.mean())
    x = torch.arange(7.0)[:, None]
    assert task.kind == "custom"
    assert task.evaluate(nn.Identity(), (x, x)) == {"loss": pytest.approx(3.0), "examples": 7}


def test_an_own_loss_gets_the_outputs_and_the_whole_batch() -> None:
    seen = []

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        seen.append((outputs.shape, batch[0].shape, batch[1].dtype))
        return (outputs[:, 0] - batch[1]).abs().mean()

    result = fedfactor.simulate(nn.Linear(4, 1), (X, Y), loss=loss, clients=4, rounds=30, lr=0.05, batch_size=5)
    assert set(seen[1:]) == {((5, 1), (5, 4), torch.float32)}
    assert result.history[-1]["loss"] < result.history[1]["loss"] / 4


def test_an_own_loss_of_a_classification_keeps_its_accuracy() -> None:
    plain = run("fedavg", rounds=1)
    smooth = run(
        "fedavg", rounds=1, kind="classification",
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1], label_smoothing=0.3),
    )  # fmt: skip
    assert smooth.history[-1]["global"]["1"]["accuracy"] >= 0
    assert smooth.summary["weights_sha256"] != plain.summary["weights_sha256"]


def test_the_loss_of_the_outputs_counts_unless_another_is_given() -> None:
    data = FederatedData(Records(datasets(1), padded), [torch.arange(20)])
    batch, model = data.batch(data.train, slice(6)), Bag()
    outputs = Task(model, data).outputs(model, batch)
    usual = F.cross_entropy(outputs.logits, batch["labels"])
    assert Task(model, data).loss(outputs, batch) == outputs.loss == usual
    assert Task(model, data, objective=doubled).loss(outputs, batch) == 2 * usual
    assert Task(model, data, "custom").loss(outputs, batch) == usual
    masked = Task(model, data).loss(outputs, batch, only=torch.tensor([0]))
    assert masked == F.cross_entropy(outputs.logits * torch.tensor([1.0, 0.0]), batch["labels"])
    outputs.loss = None
    assert Task(model, data).loss(outputs, batch) == usual, "the loss of the kind"
    with pytest.raises(ValueError, match="a custom task needs a loss"):
        Task(model, data, "custom").loss(outputs, batch)


def test_classes_of_sequences_are_along_the_last_axis_of_logits() -> None:
    sequence, image = torch.randn(2, 5, 3), torch.randn(2, 3, 8, 8)
    assert logits_of(Output(None, sequence)).shape == (2, 3, 5)
    assert logits_of(Output(None, image)) is image and logits_of(sequence) is sequence


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda outputs, batch: (outputs[:, 0] - batch[1]) ** 2, r"a scalar tensor, .* got a tensor of shape \[2\]"),
        (lambda outputs, batch: 0.5, "a scalar tensor, .* got a float"),
        (lambda outputs, batch: outputs.mean().detach(), "the loss has no gradient"),
        (lambda outputs, batch: outputs.mean() * float("nan"), "the loss of the first examples is NaN"),
        (nn.L1Loss(), r"the loss, which is called as loss\(outputs, batch\), failed: AttributeError: 'tuple'"),
    ],
)
def test_a_loss_that_cannot_be_minimised_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fedfactor.simulate(nn.Linear(4, 1), (X, Y), loss=loss)


def test_a_loss_that_becomes_a_vector_later_is_named() -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        found = (outputs[:, 0] - batch[1]).square()
        return found if len(found) == 5 else found.mean()

    with pytest.raises(RuntimeError, match=r"the loss must be a scalar tensor, .* got a tensor of shape \[5\]"):
        fedfactor.simulate(nn.Linear(4, 1), (X, Y), loss=loss, clients=2, rounds=1, batch_size=15)


def test_a_loss_is_a_function() -> None:
    with pytest.raises(TypeError, match=r"loss must be a function of \(outputs, batch\), got 'mse'; see `kind`, too"):
        fedfactor.simulate(nn.Linear(4, 1), (X, Y), loss="mse")  # type: ignore[arg-type]


def test_bfloat16_does_not_round_the_targets_of_a_regression() -> None:
    task = Task(nn.Linear(4, 1), regression(), "regression")
    for targets in (torch.tensor([1001.5]), torch.tensor([1001])):
        loss = task.loss(torch.tensor([[1000.0]], dtype=torch.bfloat16), (X[:1], targets))
        assert loss == (float(targets) - 1000) ** 2


def test_positions_without_an_answer_are_left_out() -> None:
    """-100 is what torch's cross-entropy ignores; the second batch has no other targets."""
    logits = torch.tensor([[[9.0, 9.0, 0.0], [0.0, 0.0, 9.0]], [[9.0, 0.0, 9.0], [0.0, 9.0, 0.0]]])
    labels = torch.tensor([[0, 0, -100], [-100, -100, -100]])
    whole = Records([TensorDataset(logits, labels)])
    task = Task(nn.Identity(), FederatedData(whole, [torch.arange(2)]), evaluation_batch=1)
    scores = task.evaluate(nn.Identity(), whole)
    assert scores["accuracy"] == 1.0
    assert scores["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)))
    with pytest.raises(ValueError, match="there are no examples to measure on"):
        task.evaluate(nn.Identity(), whole[slice(1, 2)])


def test_classes_that_the_model_does_not_have_are_named() -> None:
    wrong = TensorDataset(X[:4], torch.tensor([0, 1, 2, 5]))
    train = [TensorDataset(X, torch.arange(40) % 3)]
    with pytest.raises(ValueError, match=r"targets must be in \[0, 3\), the classes of the model, .* Target 5 is"):
        fedfactor.simulate(nn.Linear(4, 3), train, test=wrong, rounds=1)
    wrong.targets = wrong.tensors[1]  # type: ignore[attr-defined]
    events: list[Any] = []
    with pytest.raises(ValueError, match="targets must be less than 3, the number of classes of the model, got 5"):
        fedfactor.simulate(nn.Linear(4, 3), train, test=wrong, rounds=1, on_event=events.append)
    assert not events, "a dataset that lists its classes is checked before the first round"


def test_a_batch_of_three_parts_does_not_say_which_are_the_targets() -> None:
    three = TensorDataset(X, torch.zeros(40).long(), torch.ones(40).long())
    with pytest.raises(ValueError, match="a batch has 3 parts, so it is not clear which one has the targets"):
        fedfactor.simulate(nn.Linear(4, 2), [three])
    fedfactor.simulate(nn.Linear(4, 2), [three], loss=lambda o, batch: F.cross_entropy(o, batch[2]), rounds=1, cohort=1)


def test_labels_per_position_are_not_one_class_per_example() -> None:
    words = Records([TensorDataset(torch.randn(4, 3, 5), torch.zeros(4, 5).long())])
    setup = Setup(
        Task(nn.Conv1d(3, 2, 1), FederatedData(words, [torch.arange(4)])),
        FedRoD(), create("optimizers", "fedavg"), create("codecs", "float32"), Training(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="needs one class per example, which this classification task does not have"):
        setup.bind([1.0])


def test_a_regression_needs_one_number_per_target() -> None:
    with pytest.raises(ValueError, match="a regression task needs one number per target; the model returns N x 2 for"):
        fedfactor.simulate(nn.Linear(4, 2), (X, Y), kind="regression")
    with pytest.raises(ValueError, match="targets must be finite, got nan in row 3"):
        fedfactor.simulate(nn.Linear(4, 1), (X, torch.where(torch.arange(40) == 3, torch.nan, Y)), kind="regression")
    with pytest.raises(ValueError, match='for real numbers, use kind="regression"'):
        fedfactor.simulate(nn.Linear(4, 1), (X, Y))


def test_a_model_that_cannot_take_the_batch_is_named_with_its_entries() -> None:
    def renamed(examples: list[Any]) -> Any:
        return {"tokens": padded(examples)["ids"], "labels": padded(examples)["labels"]}

    words = r"whose batches have the entries tokens \[2, \d\], labels \[2\], which the model gets by name: .*'tokens'"
    with pytest.raises(ValueError, match=f"the model cannot process the data, {words}"):
        fedfactor.simulate(Bag, datasets(), collate=renamed)
    with pytest.raises(ValueError, match="a batch must have a tensor of targets as the second part"):
        fedfactor.simulate(nn.Linear(4, 2), [TensorDataset(X)])


NEEDS = [
    (HeteroFL(label_rows=True), "heterofl's label_rows needs one class per example"),
    (HeteroFL(masked_loss=True), "heterofl's masked loss needs one class per example"),
    (FLANC(masked_loss=True), "flanc's masked loss needs one class per example"),
    (FedHM(masked_loss=True), "fedhm's masked loss needs one class per example"),
    (FedHM(distill=0.5), "fedhm's self-distillation needs logits of classes"),
    (FjORD(masked_loss=True), "fjord's masked loss needs one class per example"),
    (FjORD(distill=True), "fjord's distillation needs logits of classes"),
    (FedRoD(), "fedrod's balanced loss needs one class per example"),
    (PFedSD(), "pfedsd's distillation needs logits of classes"),
]


@pytest.mark.parametrize(("method", "reason"), NEEDS, ids=lambda one: str(one)[:24])
def test_what_needs_classes_or_logits_is_refused_for_a_task_without(method: Method, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{reason}, which this regression task does not have"):
        fedfactor.simulate(Tiny, (X, Y), kind="regression", method=method)
    setup = Setup(
        Task(Tiny, odd(), "binary"), method, create("optimizers", "fedavg"), create("codecs", "float32"), Training()
    )
    if "logits" in reason:  # one logit stands for two classes
        setup.bind([1.0])
    else:
        with pytest.raises(ValueError, match=f"{reason}, which this binary task does not have"):
            setup.bind([1.0])
