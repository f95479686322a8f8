"""The registry of networks itself."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
import torch
from torch import nn

from fedfactor import models, registry
from fedfactor.registry import register


@pytest.fixture(autouse=True)
def a_registry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._table, "models", dict(registry._table["models"]))


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    points = (
        EntryPoint("theirs", f"{__name__}:undecorated", "fedfactor.models"),
        EntryPoint("broken", "no_such_module_anywhere:model", "fedfactor.models"),
    )
    monkeypatch.setattr(registry, "_plugins", lambda kind: points)
    yield


def undecorated(size: int = 3) -> nn.Module:
    return nn.Linear(size, size)


def other(size: int = 3) -> nn.Module:
    return nn.Linear(size, size)


def test_unknown_name_gets_the_nearest_match_and_the_list() -> None:
    with pytest.raises(ValueError, match=r"no model is called 'resnet81'; did you mean 'resnet\d+'\? there are cnn4, "):
        models.build("resnet81")
    with pytest.raises(ValueError, match=r"no model is called 'qqqq'; there are cnn4, "):
        models.build("qqqq")


def test_a_user_can_add_a_network() -> None:
    register("models", "mine", input_shape=(3,))(undecorated)
    assert "mine" in models.list_models("m*")
    assert models.build("mine", size=2).get_parameter("weight").shape == (2, 2)
    assert models.example_input("mine", 4).shape == (4, 3)
    assert models.info("mine").builder is undecorated


def test_a_name_is_given_once_but_a_module_may_be_reloaded() -> None:
    register("models", "mine")(undecorated)
    register("models", "mine")(undecorated)
    with pytest.raises(ValueError, match=r"'mine' is already registered by .*undecorated; choose another .*other"):
        register("models", "mine")(other)


def test_plugins_are_listed_without_import_and_loaded_when_asked(plugin: None) -> None:
    assert {"theirs", "broken", "vgg16"} <= set(models.list_models())
    assert isinstance(models.build("theirs", size=5), nn.Linear)
    with pytest.raises(
        ImportError, match="entry point 'broken' of no_such_module_anywhere:model cannot be loaded: No module"
    ):
        models.build("broken")
    with pytest.raises(ValueError, match="registered without input_shape"):
        models.example_input("theirs")
    assert models.example_input("theirs", 2, shape=(5,)).shape == (2, 5)


def test_examples_of_tokens_are_legal_and_never_padding() -> None:
    ids = models.example_input("lstm_shakespeare", 50)
    assert ids.dtype is torch.int64
    assert ids.shape == (50, 80)
    assert int(ids.min()) >= 1
    assert int(ids.max()) < 80


def test_examples_follow_the_generator() -> None:
    a, b = (models.example_input("vgg16", generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(a, b)
