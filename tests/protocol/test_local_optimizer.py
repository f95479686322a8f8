"""What a user may choose as the clients' optimizer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from fedfactor.protocol.local_optimizer import LocalOptimizer

ADAMW = LocalOptimizer("adamw", options={"betas": (0.9, 0.95)})


@pytest.mark.parametrize(
    "chosen",
    [
        {"name": "adamw", "betas": [0.9, 0.95]},
        {"name": torch.optim.AdamW, "betas": (0.9, 0.95)},
        functools.partial(torch.optim.AdamW, betas=(0.9, 0.95)),
        ADAMW,
    ],
    ids=str,
)
def test_all_ways_to_say_it_are_the_same(chosen: Any) -> None:
    assert LocalOptimizer.of(chosen) == ADAMW
    assert LocalOptimizer.of(ADAMW.table()) == ADAMW


def test_a_class_has_the_name_by_which_it_is_imported() -> None:
    assert LocalOptimizer.of(torch.optim.SGD) == LocalOptimizer.of("sgd") == LocalOptimizer()
    named = LocalOptimizer.of(torch.optim.NAdam)
    assert (named.name, named.torch_class) == ("torch.optim.nadam:NAdam", torch.optim.NAdam)
    assert named.options == {"eps": 1e-8, "betas": (0.9, 0.999), "momentum_decay": 4e-3}


class Local(torch.optim.SGD):
    """A class that a module replaces under the same name."""


FIRST = Local


class Local(torch.optim.SGD):  # type: ignore[no-redef]
    """The other one."""


def test_torchs_own_classes_have_their_short_names() -> None:
    assert LocalOptimizer.of("torch.optim:SGD") == LocalOptimizer.of(torch.optim.SGD) == LocalOptimizer.of("sgd")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("adamm", "no local optimizer is called 'adamm'; did you mean 'adam'"),
        ({"name": "adamw", "beta": 1}, "adamw has no option 'beta'; did you mean 'betas'? it has lr, betas, eps"),
        ({"name": "adam", "fused": True}, "adam has no option 'fused'"),
        (torch.optim.LBFGS, "computes the loss several times per step"),
        (torch.nn.Linear, "is no local optimizer: derive a class from torch.optim.Optimizer"),
        ("torch.optim:Nothing", "cannot be imported as package.module:name"),
        (3, "a local optimizer is a name, a class or functools.partial(class, ...), got 3"),
        (functools.partial(torch.optim.Adam, []), "a local optimizer is a name, a class or functools.partial"),
        ({"name": "adam", "keep_state": 1}, "keep_state should be true or false, got 1"),
        (FIRST, "is another class now: local optimizers are imported by their names"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_named(chosen: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        LocalOptimizer.of(chosen)
    assert message in str(error.value)
