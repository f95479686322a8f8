"""Metrics of a task: by hand, with torchmetrics' own, in all engines, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MultilabelF1Score,
)
from torchmetrics.functional.classification import binary_auroc, multiclass_auroc, multiclass_f1_score

import fedfactor
from fedfactor.data.clients import FederatedData
from fedfactor.export import export
from fedfactor.server.result import Result
from fedfactor.task import ACCURACY, LOSS, Decider, Task
from tests.helpers.tiny import Tiny, data, odd, run

X = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]])
Y = torch.tensor([1.0, 0.0, 4.0, 10.0, 0.0])
"""Numbers whose errors, if a model repeats its inputs, are 0, 2, 0, -2 and 16."""


def numbers() -> FederatedData:
    return FederatedData((X, Y), [torch.tensor([0, 1, 2]), torch.tensor([3, 4])], (X, Y))


def repeating(metrics: Any, batch: int = 2, **options: Any) -> dict[str, float]:
    """Evaluate a model that repeats its inputs, in batches of 2, 2 and 1."""
    return Task(nn.Identity(), numbers(), "regression", batch, metrics=metrics, **options).evaluate(
        nn.Identity(), (X, Y)
    )


def absolute(outputs: Tensor, batch: Any) -> Tensor:
    return (outputs.flatten() - batch[1]).abs()


def test_functions_by_hand_with_an_uneven_last_batch() -> None:
    metrics: dict[str, Any] = {
        "single": absolute,
        "mean": lambda outputs, batch: absolute(outputs, batch).mean(),
        "column": lambda outputs, batch: absolute(outputs, batch)[:, None],
        "plain": lambda outputs, batch: float(absolute(outputs, batch).mean()),
        "hits": lambda outputs, batch: absolute(outputs, batch) < 1,
        "mae": "mae",
        "squares": "mse",
    }
    scores = repeating(metrics)
    assert {scores[name] for name in ("single", "mean", "column", "plain", "mae")} == {20 / 5}  # not (1 + 1 + 16) / 3
    assert scores["hits"] == 2 / 5 and scores["squares"] == scores["loss"] == 264 / 5
    assert scores["examples"] == 5 and "accuracy" not in scores
    assert repeating(["mae"])["mae"] == 4
    two = Task(nn.Identity(), numbers(), "regression", metrics=["mae", "mse"])
    pairs = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    scores = two.evaluate(nn.Identity(), (pairs, torch.zeros(2, 2)))
    assert (scores["mae"], scores["mse"]) == (2.5, 7.5)


def test_sequences_are_weighted_by_examples() -> None:
    task = Task(nn.Identity(), data(), "language", 2, metrics={"first": lambda outputs, batch: batch[1][:, 0].float()})
    tokens = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 0, 0]])
    scores = task.evaluate(nn.Identity(), (torch.zeros(3, 2, 3), tokens))
    assert scores["first"] == pytest.approx(2 / 3) and scores["examples"] == 9


def test_torchmetrics_see_all_predictions_at_once() -> None:
    """F1 and AUROC of parts have no mean that is theirs. Batches of 7 out of 100 end with one of 2."""
    rng = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(100, 3, generator=rng), torch.randint(3, (100,), generator=rng)
    found = FederatedData((logits, labels), [torch.arange(100)], (logits, labels))
    metrics = {"f1": MulticlassF1Score(3, average="macro"), "auroc": MulticlassAUROC(3)}
    task = Task(nn.Identity(), found, evaluation_batch=7, metrics=metrics)
    scores = task.evaluate(nn.Identity(), (logits, labels))
    assert scores["f1"] == pytest.approx(float(multiclass_f1_score(logits, labels, 3, average="macro")))
    assert scores["auroc"] == pytest.approx(float(multiclass_auroc(logits.softmax(1), labels, 3)))
    again = task.evaluate(nn.Identity(), (logits, labels))
    assert again == scores  # an evaluation leaves nothing behind
    parts = [
        float(multiclass_f1_score(a, b, 3, average="macro"))
        for a, b in zip(logits.split(7), labels.split(7), strict=True)
    ]
    assert abs(sum(parts) / len(parts) - scores["f1"]) > 0.01


def test_logits_of_a_binary_task_become_probabilities() -> None:
    """torchmetrics takes a batch whose logits all lie in [0, 1] for probabilities; the last one is such a batch."""
    logits = torch.tensor([[-3.0], [2.5], [0.9], [0.2]])
    labels = torch.tensor([0, 0, 1, 1])
    task = Task(nn.Identity(), odd(), "binary", 2, metrics={"auroc": BinaryAUROC()})
    scores = task.evaluate(nn.Identity(), (logits, labels))
    assert scores["auroc"] == pytest.approx(float(binary_auroc(logits.flatten().sigmoid(), labels))) == 0.5


def test_a_binary_task_may_have_several_labels_per_example() -> None:
    logits, labels = torch.tensor([[3.0, -1.0, 2.0], [-2.0, 4.0, -1.0]]), torch.tensor([[1, 0, 0], [0, 1, 1]])
    task = Task(nn.Identity(), odd(), "binary", metrics={"f1": MultilabelF1Score(num_labels=3)})
    assert task.evaluate(nn.Identity(), (logits, labels))["f1"] == pytest.approx(2 / 3)


def test_mean_absolute_error_of_torchmetrics() -> None:
    assert repeating({"mae": MeanAbsoluteError()})["mae"] == 4.0


class Worst:
    """The largest error: an own metric with state."""

    higher_is_better = False

    def reset(self) -> None:
        self.found = 0.0

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.found = max(self.found, float((preds - target).abs().max()))

    def compute(self) -> float:
        return self.found


def test_own_objects_need_no_base_class() -> None:
    task = Task(nn.Identity(), numbers(), "regression", 2, metrics={"worst": Worst()}, best="worst")
    assert task.evaluate(nn.Identity(), (X, Y))["worst"] == 16.0
    assert task.decider == Decider("worst", higher_is_better=False)


def test_what_decides() -> None:
    def decider(kind: Any = "classification", **options: Any) -> Decider:
        return Task(nn.Identity(), numbers() if kind == "regression" else data(), kind, **options).decider

    assert decider() == ACCURACY and decider("regression") == LOSS and decider(best="loss") == LOSS
    assert decider("language", best="perplexity") == Decider("perplexity", False)
    assert decider("regression", metrics=["mae"], best="mae") == Decider("mae", False)
    assert decider("regression", metrics={"e": absolute}) == LOSS
    assert decider("regression", metrics={"e": absolute}, best="e", higher_is_better=False) == Decider("e", False)
    assert decider(metrics={"f1": MulticlassF1Score(10)}, best="f1") == Decider("f1", True)
    assert decider("regression", metrics={"e": MeanAbsoluteError()}, best="e") == Decider("e", False)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown best": ({"best": "f2", "metrics": {"f1": absolute}}, "no metric 'f2'; did you mean 'f1'"),
    "no direction": ({"best": "f1", "metrics": {"f1": absolute}}, "higher_is_better = true or false how to read 'f1'"),
    "a table": ({"best": "m", "metrics": {"m": MulticlassConfusionMatrix(3)}}, "how to read 'm'"),
    "wrong direction": ({"best": "loss", "higher_is_better": True}, "lower values of 'loss' are better"),
    "direction of nothing": ({"higher_is_better": True}, "give `best` too"),
    "a number": ({"metrics": {"m": 3}}, "metric 'm' must be a function"),
    "a class": ({"metrics": {"m": MeanAbsoluteError}}, "metric 'm' must be a function"),
    "unknown name": ({"metrics": {"m": "mea"}}, "no built-in metric 'mea'; .*there are mae, mse"),
    "a taken name": ({"metrics": {"loss": absolute}}, "cannot have the name 'loss'"),
    "another taken name": ({"metrics": {"who": absolute}}, "cannot have the name 'who'"),
    "a number as name": ({"metrics": {"1": absolute}}, "begins with a letter: '1'"),
    "no mapping": ({"metrics": absolute}, "metrics must be a mapping"),
    "one word": ({"metrics": "mae"}, "metrics must be a mapping"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_metrics_are_refused_by_name(what: str) -> None:
    options, sentence = REFUSED[what]
    with pytest.raises((ValueError, TypeError), match=sentence):
        Task(nn.Identity(), numbers(), "regression", **options)


def raising(outputs: Any, batch: Any) -> float:
    raise KeyError("mask")


WRONG: dict[str, tuple[Any, str]] = {
    "word": (lambda outputs, batch: "good", "metric 'm' must return one value per example .*, got 'good'"),
    "nothing": (lambda outputs, batch: None, "metric 'm' must return one value per example"),
    "too many": (lambda outputs, batch: torch.ones(len(batch[1]) + 1), r"metric 'm' .*, got a tensor of shape \[3\]"),
    "raising": (raising, "metric 'm' failed: KeyError: 'mask'"),
    "shapes": (MulticlassF1Score(3), "metric 'm' failed: "),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_metric_that_returns_no_numbers_is_refused_before_the_first_round(what: str) -> None:
    metric, sentence = WRONG[what]
    events: list[Any] = []
    with pytest.raises(ValueError, match=sentence):
        regression(metrics={"m": metric}, on_event=events.append)
    assert not events


def test_a_metric_that_is_not_finite_is_named() -> None:
    with pytest.raises(ValueError, match="metric 'm' is nan although the loss is finite"):
        repeating({"m": lambda outputs, batch: float("nan")})
    with pytest.raises(RuntimeError, match="ValueError: metric 'm' is nan although"):  # clients test before they train
        run(metrics={"m": lambda outputs, batch: outputs.sum(1) * float("nan")})
    scores = Task(nn.Identity(), numbers(), "regression", metrics=["mae"]).evaluate(nn.Identity(), (X * 1e38, Y))
    assert "loss" not in scores  # the model's fault
    with pytest.raises(ValueError, match=r"metric 'm' must compute one number, got .* choose an average"):
        Task(nn.Identity(), data(), metrics={"m": MulticlassF1Score(3, average=None)}).evaluate(
            nn.Identity(), (torch.zeros(2, 3), torch.tensor([0, 1]))
        )
    with pytest.raises(ValueError, match="metric 'm' must compute one number"):
        repeating({"m": MetricCollection([MeanAbsoluteError()])})


def regression(**options: Any) -> Result:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(230, 4, generator=rng)
    y = x @ torch.tensor([1.0, -2.0, 3.0, 0.5]) + 1
    split = [torch.arange(40) + 40 * client for client in range(4)]
    whole = FederatedData((x, y), split, (x[:110], y[:110]), [torch.arange(20) + 20 * client for client in range(4)])
    settings: dict[str, Any] = {"rounds": 4, "lr": 0.1, "kind": "regression", "evaluate_batch_size": 25}
    return fedfactor.simulate(lambda: nn.Linear(4, 1), whole, **{**settings, **options})


METRICS: Mapping[str, Any] = {"mae": "mae", "f": absolute, "t": MeanAbsoluteError()}


def test_the_lowest_error_is_best() -> None:
    result = regression(metrics=METRICS, best="mae", evaluate_clients="all", target=1.5)
    curve = [event["global"]["1"]["mae"] for event in result.history if "global" in event]
    assert curve == sorted(curve, reverse=True)  # it learns
    assert result.history[0]["metric"] == {"name": "mae", "higher_is_better": False}
    assert "lowest mean mae" in result.history[0]["protocol"]["best"]
    summary = result.summary
    found = summary["measured"]["global"]
    assert (found["best"], found["best_round"], found["final"]) == (min(curve), 4, curve[-1])
    reached = next((number for number, value in enumerate(curve, 1) if value <= 1.5), None)
    assert found["reached"] is not None and found["reached"]["round"] == reached
    assert summary["metric"] == {"name": "mae", "higher_is_better": False} and summary["mae_of"] == "all"
    assert summary["final_mae"] == summary["measured"]["all"]["final"] and "final_accuracy" not in summary
    last = result.history[-1]["all"]
    assert last["worst_decile"] == max(last["each"]) and last["mae"] == pytest.approx(sum(last["each"]) / 4)
    assert last["f"] == pytest.approx(last["mae"], rel=1e-6) == pytest.approx(last["t"], rel=1e-6)
    assert "global: mae" in str(result)


def test_classification_keeps_its_accuracy() -> None:
    f1 = {"f1": MulticlassF1Score(10, average="macro")}
    plain, measured = run(), run(metrics=f1, best="f1")
    assert plain.summary["weights_sha256"] == measured.summary["weights_sha256"]
    for key in ("final_accuracy", "best_accuracy"):
        assert isinstance(plain.summary[key], float)
    assert measured.summary["final_accuracy"] == plain.summary["final_accuracy"]
    assert measured.summary["metric"]["name"] == "f1" and "f1_of" in measured.summary


def test_a_diverged_model_has_no_best() -> None:
    with pytest.raises(RuntimeError, match="training diverged"):
        regression(lr=1e12, rounds=3)


def test_a_run_is_resumed_with_the_metric_that_it_began_with(tmp_path: Path) -> None:
    first = run(rounds=1, directory=tmp_path / "run")
    noted = tmp_path / "run" / "checkpoint"
    assert first.summary["metric"] == {"name": "accuracy", "higher_is_better": True} and noted.exists()
    with pytest.raises(ValueError, match=r"best was accuracy \(higher is better\) and is now loss \(lower is better\)"):
        run(rounds=2, directory=tmp_path / "run", best="loss")
    assert run(rounds=2, directory=tmp_path / "run").summary["rounds"] == 2
    recorded = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert recorded["metric"]["name"] == "accuracy"


def test_a_target_lies_where_the_metric_does() -> None:
    with pytest.raises(ValueError, match=r"target must be in \[0, 1\] as accuracy is, got 80"):
        run(target=80)
    assert regression(target=80.0, rounds=1).summary["measured"]["global"]["reached"]["round"] == 1


def test_a_run_directory_opens_with_its_metric(tmp_path: Path) -> None:
    settings = {"metrics": METRICS, "best": "mae", "directory": tmp_path / "run"}
    result = regression(**settings)
    opened = fedfactor.load(tmp_path / "run", model=lambda: nn.Linear(4, 1))
    assert opened.summary["final_mae"] == result.summary["final_mae"] == opened.table()["global.1.mae"][-1]
    assert opened.recipe.tables["evaluate"]["metrics"]["t"].endswith(":MeanAbsoluteError")
    card = export(tmp_path / "run", tmp_path / "m.pt2", model=lambda: nn.Linear(4, 1), with_data=False).card.read_text()
    assert "| mae | not measured |" in card and "| mae in the run | " in card and "numbers, one per target" in card
    assert regression(**{**settings, "rounds": 5, "metrics": ["mae"]}).summary["rounds"] == 5  # others may change


def test_tiny_is_measured_by_a_function_of_its_batch() -> None:
    central = data().central
    assert central is not None
    task = Task(Tiny, data(), metrics={"right": lambda outputs, batch: outputs.argmax(1) == batch[1]})
    scores = task.evaluate(Tiny(), central)
    assert scores["right"] == scores["accuracy"]
