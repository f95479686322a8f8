"""`fedfactor.simulate`, `list_methods`, `create_method` and `list_models`: what they take, and what they say."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import get_type_hints

import pytest

import fedfactor
from fedfactor.methods import FedPara
from fedfactor.protocol.settings import Rounds, Training

PARAMETERS = inspect.signature(fedfactor.simulate).parameters


@pytest.mark.parametrize("settings", [Training, Rounds])
def test_the_settings_are_parameters_with_the_same_defaults(settings: type) -> None:
    names = [field.name for field in dataclasses.fields(settings)]
    assert [name for name in PARAMETERS if name in names] == names
    assert settings(**{name: PARAMETERS[name].default for name in names}) == settings()
    ours, theirs = get_type_hints(fedfactor.simulate), get_type_hints(settings)
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}


def test_every_parameter_is_documented() -> None:
    section = (fedfactor.simulate.__doc__ or "").partition("Args:")[2].partition("Raises:")[0]
    assert re.findall(r"^        (\w+): \S", section, re.MULTILINE) == [
        name for name in PARAMETERS if name != "unknown"
    ]


def test_mistakes_in_names_are_explained() -> None:
    for old, new in {"batch": "batch_size", "clip": "max_grad_norm"}.items():
        with pytest.raises(TypeError, match=f"{old} is now {new}"):
            fedfactor.simulate(None, None, **{old: 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no parameter 'epoch'; did you mean 'epochs'\\? there are model, data, test"):
        fedfactor.simulate(None, None, epoch=1)  # type: ignore[arg-type]


def test_methods_and_models_are_listed_by_pattern() -> None:
    found = fedfactor.list_methods("fed*")
    assert {"fedavg", "fedpara"} <= set(found) and all(name.startswith("fed") for name in found)
    assert found == sorted(found) and set(found) < set(fedfactor.list_methods())
    assert fedfactor.list_models("resnet1?") == ["resnet10", "resnet18"]
    assert fedfactor.list_methods("nothing*") == []


def test_a_method_is_created_by_name() -> None:
    assert fedfactor.create_method("fedpara", gamma=0.3) == FedPara(gamma=0.3)
    with pytest.raises(ValueError, match="no method is called 'fedparra'; did you mean 'fedpara'"):
        fedfactor.create_method("fedparra")
    with pytest.raises(ValueError, match="method fedpara has no field 'gama'; did you mean 'gamma'"):
        fedfactor.create_method("fedpara", gama=0.3)


def test_public_names_are_all_there() -> None:
    for name in fedfactor.__all__:
        assert getattr(fedfactor, name).__name__ == name
