"""The one table of everything that a recipe can name, and the entry points of other packages that add to it.

    @register("methods", "mine", paper="...")
    @dataclass(frozen=True)
    class Mine(Method): ...

A package lists such modules in its entry points of the group `fedfactor.KIND`: `fedfactor.methods`,
`fedfactor.optimizers`, `fedfactor.codecs`, `fedfactor.partitions`, `fedfactor.models`, `fedfactor.data` or
`fedfactor.loggers`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fedfactor.support.checks import near

KINDS = ("methods", "optimizers", "codecs")
"""The kinds that combine freely in a run."""

Target = TypeVar("Target", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Entry:
    """A registered class or function; `paper` says where it is from."""

    kind: str
    name: str
    target: Any
    paper: str = ""

    @property
    def cls(self) -> type:
        """The registered class."""
        return self.target  # type: ignore[no-any-return]

    @property
    def origin(self) -> str:
        """Module and name of what is registered."""
        return f"{self.target.__module__}.{getattr(self.target, '__qualname__', repr(self.target))}"

    @property
    def summary(self) -> str:
        """First paragraph of the docstring, on one line."""
        return " ".join((self.target.__doc__ or "").split("\n\n")[0].split())

    def fields(self) -> list[dict[str, Any]]:
        """Return name, type, default and help of each hyper-parameter of a dataclass."""
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
        """Return the entry as plain data."""
        return {
            "kind": self.kind.removesuffix("s"),
            "name": self.name,
            "paper": self.paper,
            "summary": self.summary,
            "fields": self.fields(),
        }


class _Kind(NamedTuple):
    """How one kind is called in messages, which module registers the library's own, and what describes an entry."""

    word: str
    home: str
    settings: bool = True
    """Whether entries are frozen dataclasses, whose fields are settings. One module may register several of them, so
    all entry points are loaded before a name is looked up. For the other kinds an entry point has the name of its
    entry: it is loaded only when that name is asked for, and may refer to a function or class without `register`."""
    entry: str = f"{__name__}:Entry"
    base: str = ""
    """The class from which entries of the kind are derived."""


_KINDS = {
    "methods": _Kind("method", "fedfactor.methods", base="fedfactor.protocol.method:Method"),
    "optimizers": _Kind("optimizer", "fedfactor.optimizers", base="fedfactor.protocol.optimizer:Optimizer"),
    "codecs": _Kind("codec", "fedfactor.protocol.codecs", base="fedfactor.protocol.codecs:Codec"),
    "partitions": _Kind("partition", "fedfactor.data.partitions"),
    "models": _Kind("model", "fedfactor.models", False, "fedfactor.models.registry:ModelInfo"),
    "data": _Kind("data set", "fedfactor.data.sources", False, "fedfactor.data.sources.registry:Source"),
    "loggers": _Kind("logger", "fedfactor.runs.loggers", False),
}
_table: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}


def described(text: str, tries: Sequence[float] = ()) -> dict[str, Any]:
    """Return the metadata of a dataclass field.

    Args:
        text: What the field means; shown by `fedfactor methods` and in the docs.
        tries: For a field that sets the size of networks, values from large to small. `fedfactor plan` takes the
            first value that fits a device.
    """
    return {"help": text} | ({"tries": tuple(tries)} if tries else {})


def register(kind: str, name: str, paper: str = "", **details: Any) -> Callable[[Target], Target]:
    """Return a decorator that registers a class or a function under a name.

    Args:
        kind: `methods`, `optimizers`, `codecs` or `partitions`: frozen dataclasses whose fields all have a default;
            the class gets the attribute `name`. `models`: a function or class that builds a network. `data`: a
            function that reads a data set. `loggers`: a class like `fedfactor.runs.loggers.Logger`.
        name: What a recipe writes.
        paper: Where it is from.
        details: For models the other fields of `fedfactor.models.ModelInfo`, for data those of
            `fedfactor.data.sources.Source`.
    """
    chosen = _KINDS[kind]

    def enter(target: Target) -> Target:
        entry = _attribute(chosen.entry)(kind, name, target, paper, **details)
        known = _table[kind].get(name)
        if known is not None and known.origin != entry.origin:
            raise ValueError(
                f"{chosen.word} {name!r} is already registered by {known.origin}; choose another name for "
                f"{entry.origin}"
            )
        if chosen.settings:
            _check_settings(target)
            target.name = name  # type: ignore[attr-defined]
        _table[kind][name] = entry
        return target

    return enter


def names(kind: str, pattern: str = "*") -> list[str]:
    """Return the sorted names of a kind that match a pattern such as `fed*`.

    Plug-ins are imported only if their entry points do not have the names of what they register (see `_Kind`).
    """
    known = entries(kind) if _KINDS[kind].settings else {*_own(kind), *(point.name for point in _plugins(kind))}
    return sorted(fnmatch.filter(known, pattern))


def entries(kind: str) -> dict[str, Any]:
    """Return all entries of a kind, sorted by name, after importing the library's own and all plug-ins."""
    known = _own(kind)
    for point in _plugins(kind):
        _load(kind, point)
    return dict(sorted(known.items()))


def get(kind: str, name: str) -> Any:
    """Return the entry of a name (an `Entry`, `ModelInfo` or `Source`). Raise ValueError if there is none.

    A method, optimizer or codec may also be a class of your own, as `package.module:Class`.
    """
    if ":" in name and kind in KINDS:
        return _own_class(kind, name)
    known = entries(kind) if _KINDS[kind].settings else _own(kind)
    for point in _plugins(kind) if name not in known else ():
        if point.name == name:
            _load(kind, point)
    if name not in known:
        raise unknown(kind, name)
    return known[name]


def unknown(kind: str, name: str, reason: str = "") -> ValueError:
    """Return the error for a name that is not registered; `reason` says what else was tried."""
    known = names(kind)
    hint = near(name.partition(":")[0], known)
    return ValueError(f"no {_KINDS[kind].word} is called {name!r}{reason}; {hint}there are {', '.join(known)}")


def create(kind: str, name: str, **settings: Any) -> Any:
    """Build a registered dataclass with the given fields. Raise ValueError if the name or a field is unknown."""
    cls = get(kind, name).cls
    legal = [f.name for f in dataclasses.fields(cls)]
    for key in settings:
        if key not in legal:
            word, hint = _KINDS[kind].word, near(key, legal)
            raise ValueError(f"{word} {name} has no field {key!r}; {hint}it has {', '.join(legal) or 'none'}")
    return cls(**settings)


def imported(path: str) -> Any:
    """Import the function or class `package.module:name`, from the current folder too. Raise ValueError if it fails."""
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, so that a file here never replaces an installed package
    try:
        found = _attribute(path)
        if not callable(found):
            raise TypeError(f"it is a {type(found).__name__}, not a function or class")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        missing = isinstance(error, ModuleNotFoundError)
        hint = ". On each machine of the run, it must be in the current folder, on PYTHONPATH or installed"
        raise ValueError(
            f"{path!r} cannot be imported as package.module:name: {error}{hint if missing else ''}"
        ) from error
    return found


def _own_class(kind: str, path: str) -> Entry:
    """Return the entry of a class that need not be registered. Raise ValueError if it is none of this kind."""
    cls, chosen = imported(path), _KINDS[kind]
    if not (isinstance(cls, type) and issubclass(cls, _attribute(chosen.base))):
        raise ValueError(f"{path!r} is no {chosen.word}: derive a class from {chosen.base.replace(':', '.')}")
    try:
        _check_settings(cls)
    except TypeError as error:
        raise ValueError(f"{path!r} is no {chosen.word}: {error}") from None
    if "name" not in cls.__dict__:
        cls.name = path  # type: ignore[attr-defined]
    return Entry(kind, path, cls)


def _attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _own(kind: str) -> dict[str, Any]:
    """Return the table of a kind, after importing the module that fills it with the library's own entries."""
    importlib.import_module(_KINDS[kind].home)
    return _table[kind]


@functools.cache
def _plugins(kind: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=f"fedfactor.{kind}"))


def _load(kind: str, point: EntryPoint) -> None:
    """Import what an entry point names, and register it if it has not done so itself."""
    chosen = _KINDS[kind]
    try:
        loaded = point.load()
        if not chosen.settings and point.name not in _table[kind]:
            if not callable(loaded):
                raise TypeError(f"{point.value} registers no {chosen.word} {point.name!r}, and is no function or class")
            register(kind, point.name)(loaded)
    except Exception as error:
        where = point.dist.name if point.dist else point.value
        raise ImportError(f"entry point {point.name!r} of {where} cannot be loaded: {error}") from error


def _check_settings(cls: Any) -> None:
    if not getattr(vars(cls).get("__dataclass_params__"), "frozen", False):  # inherited: its own fields would be none
        raise TypeError(f"{cls.__name__} must be a frozen dataclass: its fields are its hyper-parameters")
    for item in dataclasses.fields(cls):
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise TypeError(f"{cls.__name__}.{item.name} needs a default: a recipe may give the name alone")


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    # JSON has no infinity; TOML writes it like this.
    return "inf" if item.default == math.inf else item.default
