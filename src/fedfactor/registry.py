"""What a recipe can name: methods, optimizers and codecs, ours and those of installed packages.

Each is a frozen dataclass; its fields are its hyper-parameters. A package adds its own through an entry point in the
group `fedfactor.methods`, `fedfactor.optimizers` or `fedfactor.codecs`, whose module registers them when it is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, TypeVar

from fedfactor.checks import near

KINDS = ("methods", "optimizers", "codecs")
OURS = {"methods": "fedfactor.methods", "optimizers": "fedfactor.optimizers", "codecs": "fedfactor.protocol.codecs"}

_entries: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}
_loaded: set[str] = set()

Class = TypeVar("Class", bound=type)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One registered class, described."""

    kind: str
    name: str
    cls: type
    paper: str

    @property
    def summary(self) -> str:
        """First paragraph of its docstring, on one line."""
        return " ".join((self.cls.__doc__ or "").split("\n\n")[0].split())

    def fields(self) -> list[dict[str, Any]]:
        """Name, type, default and help of every hyper-parameter."""
        return [
            {
                "name": f.name,
                "type": f.type if isinstance(f.type, str) else f.type.__name__,
                "default": _default(f),
                "help": f.metadata.get("help", ""),
            }
            for f in dataclasses.fields(self.cls)
        ]

    def as_dict(self) -> dict[str, Any]:
        """The entry as plain data."""
        return {
            "kind": self.kind.removesuffix("s"),
            "name": self.name,
            "paper": self.paper,
            "summary": self.summary,
            "fields": self.fields(),
        }


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    # JSON has no infinity; TOML writes it like this.
    return "inf" if item.default == math.inf else item.default


def described(text: str, tries: Sequence[float] = ()) -> dict[str, Any]:
    """Metadata for a field: what it means, in words; where it sets the size of networks, values from large to small.

    `fedfactor plan` takes the first of them that fits.
    """
    return {"help": text} | ({"tries": tuple(tries)} if tries else {})


def register(kind: str, name: str, paper: str = "") -> Callable[[Class], Class]:
    """Class decorator that gives a frozen dataclass a name in a recipe; the class knows it as `name`."""

    def add(cls: Class) -> Class:
        known = _entries[kind].get(name)
        if known is not None and (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{kind.removesuffix('s')} {name!r} is registered already, by {known.cls.__module__}")
        if not (dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
            raise TypeError(f"{cls.__name__} must be a frozen dataclass: its fields are its hyper-parameters")
        for item in dataclasses.fields(cls):
            if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                raise TypeError(f"{cls.__name__}.{item.name} needs a default: a recipe may give the name alone")
        cls.name = name  # type: ignore[attr-defined]
        _entries[kind][name] = Entry(kind, name, cls, paper)
        return cls

    return add


def entries(kind: str) -> dict[str, Entry]:
    """Return everything registered of a kind, by name; loads our own and other packages' on first use."""
    if kind not in _loaded:
        importlib.import_module(OURS[kind])
        for point in entry_points(group=f"fedfactor.{kind}"):
            try:
                point.load()
            except Exception as error:
                where = point.dist.name if point.dist else point.value
                raise ImportError(f"entry point {point.name!r} of {where} cannot be loaded: {error}") from error
        _loaded.add(kind)
    return dict(sorted(_entries[kind].items()))


def create(kind: str, name: str, **settings: Any) -> Any:
    """Build a registered class with the given hyper-parameters; mistakes name what there is."""
    known = entries(kind)
    if name not in known:
        hint = near(name, known)
        raise ValueError(f"no {kind.removesuffix('s')} is called {name!r}; {hint}there are {', '.join(known)}")
    cls = known[name].cls
    legal = {f.name for f in dataclasses.fields(cls)}
    for key in settings:
        if key not in legal:
            hint = near(key, legal)
            raise ValueError(f"{name} has no field {key!r}; {hint}it has {', '.join(sorted(legal)) or 'none'}")
    return cls(**settings)
