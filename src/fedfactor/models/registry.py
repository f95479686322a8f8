"""Networks by name: a table that other packages can add to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedfactor.checks import near

GROUP = "fedfactor.models"

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a registered network without building it.

    `input_shape` is one example's, without the batch; `tokens` is the number of legal ids where the input is
    integer; `paper` says which table or section the network is from.
    """

    name: str
    builder: Callable[..., nn.Module]
    input_shape: tuple[int, ...] | None = None
    input_dtype: torch.dtype = torch.float32
    tokens: int = 0
    paper: str = ""

    def example(
        self,
        batch: int = 1,
        *,
        shape: tuple[int, ...] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw a legal input of `batch` examples; `shape` replaces the registered one."""
        size = self.input_shape if shape is None else shape
        if size is None:
            raise ValueError(f"model {self.name!r} was registered without input_shape: pass shape=(...)")
        if self.input_dtype.is_floating_point:
            return torch.randn((batch, *size), generator=generator).to(self.input_dtype)
        # Id 0 is padding in some networks; an example of real tokens is the dearest case.
        return torch.randint(1, max(self.tokens, 2), (batch, *size), generator=generator, dtype=self.input_dtype)


_models: dict[str, ModelInfo] = {}


def register(
    name: str,
    *,
    input_shape: tuple[int, ...] | None = None,
    input_dtype: torch.dtype = torch.float32,
    tokens: int = 0,
    paper: str = "",
) -> Callable[[Builder], Builder]:
    """Enter the decorated function or class under `name`; its keyword arguments are the network's options."""

    def enter(builder: Builder) -> Builder:
        known = _models.get(name)
        if known is not None and _origin(known.builder) != _origin(builder):
            raise ValueError(
                f"model {name!r} is already registered by {_origin(known.builder)}; choose another name for "
                f"{_origin(builder)}"
            )
        _models[name] = ModelInfo(name, builder, input_shape, input_dtype, tokens, paper)
        return builder

    return enter


def names() -> list[str]:
    """Names of all networks, those of other packages included (which are not imported for it)."""
    return sorted({*_models, *_plugins()})


def info(name: str) -> ModelInfo:
    """Look a network up; another package's is imported when it is first asked for."""
    if name not in _models and (plugin := _plugins().get(name)) is not None:
        loaded = plugin.load()
        if name not in _models:
            # The entry point names a plain function or class which did not use the decorator.
            register(name)(loaded)
    if name not in _models:
        known = names()
        raise ValueError(f"no model is called {name!r}; {near(name, known)}there are {', '.join(known)}")
    return _models[name]


def build(name: str, **options: Any) -> nn.Module:
    """Build a network with the given options; its weights come from torch's global generator."""
    return info(name).builder(**options)


def example_input(
    name: str,
    batch: int = 1,
    *,
    shape: tuple[int, ...] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a legal input of the named network; see `ModelInfo.example`."""
    return info(name).example(batch, shape=shape, generator=generator)


@cache
def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _origin(builder: Callable[..., nn.Module]) -> str:
    return f"{builder.__module__}.{getattr(builder, '__qualname__', repr(builder))}"
