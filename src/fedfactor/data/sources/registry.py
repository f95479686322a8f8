"""Data sets by name: a table that other packages can add to.

A package registers its own with `source`, or names a plain loader in an entry point of the group `fedfactor.data`.
`package.module:function` needs neither: see `Own`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar

from fedfactor.checks import near
from fedfactor.data.dataset import Dataset
from fedfactor.data.transform import NORMS

GROUP = "fedfactor.data"
VARIABLE = "FEDFACTOR_DATA"

PICTURE: dict[str, Any] = {"norm": "", "crop": 0, "flip": False, "rotate": 0.0}
"""Options that every data set of images has, and their defaults; an empty norm is the data set's own."""
PICTURE_TYPES: dict[str, Any] = {
    "norm": Literal["", *NORMS] | tuple[tuple[float, ...], tuple[float, ...]],
    "crop": int,
    "flip": bool,
    "rotate": float,
}

Loader = Callable[..., Dataset]
Found = TypeVar("Found", bound=Loader)


@dataclass(frozen=True)
class Source:
    """A registered data set: how it is read, and the commands that fetch its files into `{data}`.

    The loader takes the data folder and the options of a recipe. A `prefix` is followed by a colon and a name that
    the loader takes as its second argument.
    """

    name: str
    loader: Loader
    fetch: str = ""
    prefix: bool = False

    @property
    def summary(self) -> str:
        """First line of the loader's docstring."""
        return (self.loader.__doc__ or "").strip().partition("\n")[0]

    @property
    def options(self) -> dict[str, Any]:
        """The loader's options and their defaults."""
        return {p.name: None if p.default is p.empty else p.default for p in self._parameters}

    @property
    def required(self) -> list[str]:
        """The options that have no default."""
        return [p.name for p in self._parameters if p.default is p.empty]

    @property
    def takes_any(self) -> bool:
        """Whether the loader takes options that it does not name."""
        return any(p.kind == p.VAR_KEYWORD for p in inspect.signature(self.loader).parameters.values())

    def read(self, name: str, folder: Path, options: dict[str, Any]) -> Dataset:
        """Call the loader; `name` is what the recipe says, with what follows a prefix."""
        return self.loader(folder, *([self.rest(name)] if self.prefix else []), **options)

    def rest(self, name: str) -> str:
        """Return what follows the prefix in a name. Raise ValueError if nothing does."""
        rest = name.partition(":")[2]
        if self.prefix and not rest:
            raise ValueError(f"{self.name} needs a name after a colon, such as {self.name}:NAME")
        return rest

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        found = [p for p in inspect.signature(self.loader).parameters.values() if p.kind not in STARRED]
        return found[2 if self.prefix else 1 :]


STARRED = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@dataclass(frozen=True)
class Own(Source):
    """A function that returns a `Dataset`: its parameters are the options, but for `folder`, the data folder."""

    def read(self, name: str, folder: Path, options: dict[str, Any]) -> Dataset:
        """Call the function and look at what it returns."""
        given = {"folder": folder} if "folder" in inspect.signature(self.loader).parameters else {}
        found = self.loader(**given, **options)
        if not isinstance(found, Dataset):
            raise ValueError(f"{name} should return a fedfactor.data.Dataset, got a {type(found).__name__}")
        return found

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        found = inspect.signature(self.loader).parameters.values()
        return [p for p in found if p.kind not in STARRED and p.name != "folder"]


class MissingData(FileNotFoundError):
    """The files of a data set are not there; the message says where they were looked for and how to get them."""


_sources: dict[str, Source] = {}


def source(name: str, *, fetch: str = "", prefix: bool = False) -> Callable[[Found], Found]:
    """Enter the decorated loader under `name`."""

    def enter(loader: Found) -> Found:
        known = _sources.get(name)
        if known is not None and _origin(known.loader) != _origin(loader):
            raise ValueError(f"data set {name!r} is already registered by {_origin(known.loader)}; choose another name")
        _sources[name] = Source(name, loader, fetch, prefix)
        return loader

    return enter


def names() -> list[str]:
    """Names of all data sets, those of other packages included (which are not imported for it)."""
    return sorted({*_sources, *_plugins()})


def info(name: str) -> Source:
    """Look a data set up; another package's is imported when it is first asked for."""
    key, colon, function = name.partition(":")
    if name in _sources or name in _plugins() or not colon:
        key = name
    if key not in _sources and (plugin := _plugins().get(key)) is not None:
        loaded = plugin.load()
        if key not in _sources:
            source(key)(loaded)
    if key in _sources:
        return _sources[key]
    known, reason = names(), ""
    if function:
        try:
            return Own(name, getattr(importlib.import_module(key), function))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            reason = f", and it is no function of a module ({error})"
    raise ValueError(f"no data set is called {name!r}{reason}; {near(key, known)}there are {', '.join(known)}")


def load(name: str, data_dir: Path | str | None = None, **options: Any) -> Dataset:
    """Read a data set from its files in `data_dir` (else `FEDFACTOR_DATA`, else the user's cache folder).

    Options are those of the loader, and for images `norm`, `crop`, `flip` and `rotate`: see `Dataset`.
    """
    found = info(name)
    legal = {**found.options, **PICTURE}
    for key in options:
        if key not in legal and not found.takes_any:
            hint = near(key, legal)
            raise ValueError(f"{found.name} has no option {key!r}; {hint}it has {', '.join(legal) or 'none'}")
    _check_complete(found, options)
    picture = {key: options.pop(key) for key in PICTURE if key in options}
    picture = {key: value for key, value in picture.items() if value != PICTURE[key]}
    folder = data_folder(data_dir)
    loaded = dataclasses.replace(found.read(name, folder, options), **picture)
    if not len(loaded.train[1]):
        raise ValueError(f"{name} has no training examples: its files in {folder} are empty, or of another layout")
    return loaded


def _check_complete(found: Source, options: dict[str, Any]) -> None:
    for key in found.required:
        if key not in options:
            raise ValueError(f"{found.name} needs {key}, which has no default")


def data_folder(data_dir: Path | str | None = None) -> Path:
    """Return the folder data sets are looked for in; it need not exist."""
    chosen = data_dir or os.environ.get(VARIABLE)
    return Path(chosen).expanduser() if chosen else user_folder()


def user_folder() -> Path:
    """Return the default folder, within the user's cache."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "fedfactor" / "data"


def missing(name: str, folder: Path, looked: list[Path]) -> MissingData:
    """Build the error of a data set whose files are in none of the places looked at."""
    places = " or ".join(str(place) for place in looked)
    fetch = info(name).fetch.format(data=folder)
    how = f"fetch it with `{fetch}`, or " if fetch else ""
    return MissingData(
        f"{name} was looked for in {places} and not found; {how}name the data folder by --data-dir or {VARIABLE}"
    )


@cache
def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _origin(loader: Loader) -> str:
    return f"{loader.__module__}.{getattr(loader, '__qualname__', repr(loader))}"
