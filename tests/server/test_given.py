"""Starting from the weights of the given model: the error of each layer, and a warning where trained weights are lost."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfactor.engines import Pool
from fedfactor.methods import FedPara, create_method
from fedfactor.models.digits import digits_cnn
from fedfactor.server.given import trained
from fedfactor.server.result import Result
from tests.helpers.recipes import recipe
from tests.helpers.tiny import data, run


class Hidden(nn.Module):
    """Two layers that Hadamard factors and low-rank ones replace."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.fc = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.hidden(x.flatten(1)).relu())


def taught(model: nn.Module, steps: int = 60) -> nn.Module:
    """Train a model on the digits."""
    images, labels = data().train
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in torch.split(torch.arange(32 * steps) % len(labels), 32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model


@functools.cache
def known() -> nn.Module:
    """Return a trained model; do not change it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return taught(Hidden())


def still(method: str, model: Any, **options: Any) -> tuple[Result, list[str]]:
    """Run one round that changes nothing; return the result and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(create_method(method, **options), model=model, rounds=1, lr=1e-12)
    return result, [str(warning.message) for warning in caught if "initialised" in str(warning.message)]


def accuracy(result: Result) -> float:
    return float(result.history[1]["global"]["1"]["accuracy"])


LEFT = {"fedpara": 0.05, "low_rank": 0.05, "pufferfish": 0.05}
"""Accuracy that the factors may lose, by method, at ranks that can hold most of the weights."""
RANKS: dict[str, dict[str, Any]] = {"fedpara": {"gamma": 0.5}, "low_rank": {"ratio": 0.8}, "pufferfish": {"first": 0}}


@pytest.mark.parametrize("method", LEFT)
def test_a_trained_model_keeps_its_accuracy(method: str) -> None:
    dense, _ = still("fedavg", known())
    assert accuracy(dense) > 0.8 and "start_errors" not in dense.history[0]
    given, said = still(method, known(), start="given", **RANKS[method])
    assert accuracy(given) > accuracy(dense) - LEFT[method] and not said
    errors = given.history[0]["start_errors"]
    assert errors and all(0 < error < 0.6 for error in errors.values()), errors
    assert given.summary["start_errors"] == errors and f"hidden.weight {errors['hidden.weight']:.3f}" in str(given)
    drawn, (text,) = still(method, known(), **RANKS[method])
    assert accuracy(drawn) < 0.4 and "start_errors" not in drawn.history[0]
    assert f"{method} discards the values of hidden.weight" in text and 'set start = "given"' in text
    assert drawn.history[0]["warnings"] == drawn.summary["warnings"] == [text]


def test_the_private_half_is_fitted_too_and_equal_in_every_process() -> None:
    given, said = still("pfedpara", known(), start="given")
    model = given.client_model(0)
    examples = data().central
    assert examples is not None and not said
    assert given.federation.setup.task.evaluate(model, examples)["accuracy"] > 0.75
    assert max(given.history[0]["start_errors"].values()) < 0.6
    with Pool(1) as pool:
        apart = run(create_method("pfedpara", start="given"), model=known(), rounds=1, lr=1e-12, engine=pool)
    assert apart.summary["private_sha256"] == given.summary["private_sha256"]


def test_methods_that_cannot_start_from_the_weights_name_those_that_can() -> None:
    network = taught(digits_cnn(10, 0.25), 30)
    _, (text,) = still("flanc", lambda width=1.0: copy.deepcopy(network) if width == 1 else digits_cnn(10, width / 4))
    assert "use a method that keeps the weights, such as fedavg or feddecomp" in text and "start =" not in text


def test_a_function_that_returns_trained_weights_is_found_out() -> None:
    _, said = still("fedpara", lambda: taught(Hidden()))
    assert len(said) == 1


def _drawn(initialise: Callable[[Tensor], Any]) -> nn.Module:
    model = Hidden()
    for layer in (model.hidden, model.fc):
        initialise(layer.weight)
    return model


FRESH: dict[str, Callable[[], nn.Module]] = {
    "as torch does": Hidden,
    "with norms": lambda: digits_cnn(10, 0.5),
    "recurrent": lambda: nn.LSTM(32, 48, 2),
    "attention": lambda: nn.TransformerEncoderLayer(48, 4, 96),
    "orthogonal": lambda: _drawn(nn.init.orthogonal_),
    "normal": lambda: _drawn(nn.init.kaiming_normal_),
    "all positive": lambda: _drawn(nn.init.uniform_),
    "sparse": lambda: _drawn(lambda weight: nn.init.sparse_(weight, 0.5)),
    "identity": lambda: _drawn(nn.init.eye_),
    "constant": lambda: _drawn(lambda weight: nn.init.constant_(weight, 0.1)),
    "zeros": lambda: _drawn(nn.init.zeros_),
    "transposed convolution": lambda: nn.ConvTranspose2d(6, 4, 3, groups=2),
}


@pytest.mark.parametrize("name", FRESH)
def test_freshly_initialised_models_are_no_false_alarm(name: str) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model = FRESH[name]()
        weights = [weight for weight, tensor in model.named_parameters() if tensor.dim() > 1]
        assert trained(model, weights) == "", seed


@pytest.mark.parametrize("model", [Hidden(), Hidden], ids=["module", "function"])
def test_no_warning_for_a_fresh_model(model: Any) -> None:
    assert still("fedpara", model)[1] == []


def test_a_small_network_shows_its_training_in_its_biases() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    inputs = torch.randn(500, 20)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()
    assert trained(network, ["0.weight"]) == "the bias of 0 has values that differ and are larger than torch draws them"


def test_signs_of_training() -> None:
    weights = ["hidden.weight", "fc.weight"]
    assert trained(known(), weights) == "the entries of hidden.weight are not independent of each other"
    normed = taught(digits_cnn(10, 0.25), 5)
    assert trained(normed, []) == "the values of the norm layer features.1 differ from each other"


def test_recipes_and_python_take_the_same_two_values() -> None:
    assert recipe("method.name=fedpara", "method.start=given").method == FedPara(start="given")
    with pytest.raises(ValueError, match="start must be one of random, given, got 'Given'"):
        FedPara(start="Given")  # type: ignore[arg-type]
