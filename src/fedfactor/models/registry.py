"""Networks by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedfactor import registry


@dataclass(frozen=True)
class ModelInfo(registry.Entry):
    """What is known about a registered network before it is built; `paper` names the table or section it is from."""

    input_shape: tuple[int, ...] | None = None
    """Shape of one example, without the batch."""
    input_dtype: torch.dtype = torch.float32
    tokens: int = 0
    """Number of legal token ids, for networks that read integers."""

    @property
    def builder(self) -> Callable[..., nn.Module]:
        """The function or class that builds the network; its parameters are the options of the model."""
        return self.target  # type: ignore[no-any-return]

    def example(
        self,
        batch: int = 1,
        *,
        shape: tuple[int, ...] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return a random legal input of `batch` examples; `shape` replaces `input_shape`."""
        size = self.input_shape if shape is None else shape
        if size is None:
            raise ValueError(f"model {self.name!r} was registered without input_shape: pass shape=(...)")
        if self.input_dtype.is_floating_point:
            return torch.randn((batch, *size), generator=generator).to(self.input_dtype)
        # Id 0 is padding in some networks; an example without padding is the most expensive case.
        return torch.randint(1, max(self.tokens, 2), (batch, *size), generator=generator, dtype=self.input_dtype)


def list_models(pattern: str = "*") -> list[str]:
    """Return the sorted names of all networks that match a pattern; plug-ins are listed without being imported."""
    return registry.names("models", pattern)


def info(name: str) -> ModelInfo:
    """Return what is known about a network; a plug-in is imported when it is first asked for."""
    found = registry.get("models", name)
    assert isinstance(found, ModelInfo)
    return found


def build(name: str, **options: Any) -> nn.Module:
    """Build a network with the given options. Its weights come from torch's global random generator."""
    return info(name).builder(**options)


def example_input(
    name: str,
    batch: int = 1,
    *,
    shape: tuple[int, ...] | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return a random legal input of a network; see `ModelInfo.example`."""
    return info(name).example(batch, shape=shape, generator=generator)
