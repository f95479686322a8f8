"""The optimizer of the clients' steps: its name and options, and the class of torch that they stand for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import optim

from fedfactor.registry import imported
from fedfactor.support.checks import near

NAMES: dict[str, type[optim.Optimizer]] = {
    "sgd": optim.SGD,
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "adagrad": optim.Adagrad,
    "rmsprop": optim.RMSprop,
}
SHORT = ("lr", "momentum", "weight_decay")
"""Options that are also settings of `Training`: either place sets both."""
NOT_OPTIONS = ("params", "foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay")
"""Parameters of torch's classes that choose an implementation or another optimizer, or do not suit clients."""


@dataclass(frozen=True)
class LocalOptimizer:
    """The optimizer of the clients' steps."""

    name: str = "sgd"
    """sgd, adam, adamw, adagrad, rmsprop, or package.module:Class, a subclass of `torch.optim.Optimizer`."""
    keep_state: bool = False
    """Whether a client keeps the optimizer's state until its next round. Otherwise each round starts without one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class, with their defaults."""

    def __post_init__(self) -> None:
        if not isinstance(self.keep_state, bool):
            raise ValueError(f"keep_state should be true or false, got {self.keep_state!r}")
        legal = self.parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in legal.values())
        for key in self.options:
            if key not in legal and not takes_all:
                raise ValueError(f"{self.name} has no option {key!r}; {near(key, [*legal])}it has {', '.join(legal)}")
        plain = {key: one.default for key, one in legal.items() if isinstance(one.default, (int, float, str, tuple))}
        known = {key: value for key, value in plain.items() if key not in SHORT} | {**self.options}
        object.__setattr__(self, "options", {key: _exact(known[key], legal.get(key)) for key in sorted(known)})

    @classmethod
    def of(cls, chosen: Any) -> LocalOptimizer:
        """Return what a user chose: a name, a class, `functools.partial(Class, ...)`, or a table as in a recipe."""
        if isinstance(chosen, LocalOptimizer):
            return chosen
        if isinstance(chosen, functools.partial) and not chosen.args:
            chosen = {"name": chosen.func, **chosen.keywords}
        table = dict(chosen) if isinstance(chosen, Mapping) else {"name": chosen}
        name, keep = table.pop("name", "sgd"), table.pop("keep_state", False)
        if isinstance(name, str) and ":" in name:  # torch.optim:SGD is sgd
            name = next((short for short, known in NAMES.items() if torch_class(name) is known), name)
        return cls(name if isinstance(name, str) else _name_of(name), keep, table)

    def table(self) -> dict[str, Any]:
        """Return the optimizer as a recipe writes it."""
        return {"name": self.name, "keep_state": self.keep_state, **self.options}

    @property
    def torch_class(self) -> type[optim.Optimizer]:
        """The class that takes the steps."""
        return torch_class(self.name)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The options that the class takes."""
        found = inspect.signature(self.torch_class).parameters
        return {name: one for name, one in found.items() if name not in NOT_OPTIONS}

    def default(self, key: str) -> float:
        """Return the class's default of an option; 0 if it has none. SGD's learning rate is 0.1 in this library."""
        found = 0.1 if (self.name, key) == ("sgd", "lr") else getattr(self.parameters.get(key), "default", 0.0)
        return float(found) if isinstance(found, (int, float)) else 0.0


def _exact(value: Any, parameter: inspect.Parameter | None) -> Any:
    """Return a value as the class declares it, whether a recipe or Python gave it: 0 or 0.0, a list or a tuple."""
    if parameter is not None and parameter.annotation in (float, "float") and type(value) is int:
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def torch_class(name: str) -> type[optim.Optimizer]:
    """Return the class of a local optimizer. Raise ValueError if there is none of that name."""
    if ":" not in name:
        if name not in NAMES:
            raise ValueError(
                f"no local optimizer is called {name!r}; {near(name, [*NAMES])}there are {', '.join(NAMES)}, and "
                "package.module:Class, a subclass of torch.optim.Optimizer"
            )
        return NAMES[name]
    found = imported(name)
    if not (isinstance(found, type) and issubclass(found, optim.Optimizer)):
        raise ValueError(f"{name!r} is no local optimizer: derive a class from torch.optim.Optimizer")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(f"{name!r} computes the loss several times per step (`closure`), which clients do not")
    return found


def _name_of(cls: Any) -> str:
    """Return the name of a class. Raise ValueError if the class cannot be found by it."""
    for name, known in NAMES.items():
        if cls is known:
            return name
    name = f"{getattr(cls, '__module__', '')}:{getattr(cls, '__qualname__', cls)}"
    if not isinstance(cls, type):
        raise ValueError(f"a local optimizer is a name, a class or functools.partial(class, ...), got {cls!r}")
    if torch_class(name) is not cls:
        raise ValueError(f"{name} is another class now: local optimizers are imported by their names")
    return name
