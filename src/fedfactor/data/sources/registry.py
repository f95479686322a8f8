"""Data sets by name, and reading them.

A loader is registered by `register("data", name)`; `package.module:function` needs no registration (see `Own`).
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedfactor import registry
from fedfactor.data.dataset import Dataset, Datasets
from fedfactor.data.transform import NORMS
from fedfactor.support.checks import near

VARIABLE = "FEDFACTOR_DATA"

PICTURE: dict[str, Any] = {"norm": "", "crop": 0, "flip": False, "rotate": 0.0}
"""Options of all data sets of images, with defaults. An empty norm stands for the data set's own."""
PICTURE_TYPES: dict[str, Any] = {
    "norm": Literal["", *NORMS] | tuple[tuple[float, ...], tuple[float, ...]],
    "crop": int,
    "flip": bool,
    "rotate": float,
}

Loader = Callable[..., Dataset | Datasets]


@dataclass(frozen=True)
class Source(registry.Entry):
    """A registered data set.

    The loader takes the data folder, then what follows the colon in the name of a data set with a `prefix` (such as
    `huggingface:NAME`), then the options that a recipe gives.
    """

    fetch: str = ""
    """Commands that download the files into the folder `{data}`."""
    prefix: bool = False

    @property
    def loader(self) -> Loader:
        """The function that reads the data set."""
        return self.target  # type: ignore[no-any-return]

    @property
    def options(self) -> dict[str, Any]:
        """The options of the loader, with their defaults."""
        return {p.name: None if p.default is p.empty else p.default for p in self._parameters}

    @property
    def required(self) -> list[str]:
        """The options that have no default."""
        return [p.name for p in self._parameters if p.default is p.empty]

    @property
    def takes_any(self) -> bool:
        """Whether the loader has a parameter `**options`."""
        return any(p.kind == p.VAR_KEYWORD for p in inspect.signature(self.loader).parameters.values())

    def read(self, name: str, folder: Path, options: dict[str, Any]) -> Dataset | Datasets:
        """Call the loader; `name` is the full name, with what follows a prefix."""
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
    """A function of the user's own, which returns a `Dataset`, `Datasets`, or one or several map-style datasets.

    Its parameters are the options. A parameter called `folder` gets the data folder.
    """

    def read(self, name: str, folder: Path, options: dict[str, Any]) -> Dataset | Datasets:
        """Call the function. Raise ValueError if it does not return data."""
        given = {"folder": folder} if "folder" in inspect.signature(self.loader).parameters else {}
        found = self.loader(**given, **options)
        if isinstance(found, Dataset | Datasets):
            return found
        try:
            return Datasets(found, name=name)
        except ValueError as error:
            raise ValueError(
                f"{name} should return a fedfactor.data.Dataset or Datasets, a map-style dataset or a list of them, "
                f"got a {type(found).__name__}: {error}"
            ) from None

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        found = inspect.signature(self.loader).parameters.values()
        return [p for p in found if p.kind not in STARRED and p.name != "folder"]


class MissingData(FileNotFoundError):
    """The files of a data set were not found; the message says where, and how to get them."""


def names() -> list[str]:
    """Return the sorted names of all data sets; plug-ins are listed without being imported."""
    return registry.names("data")


def info(name: str) -> Source:
    """Return what is known about a data set; a plug-in is imported when it is first asked for."""
    key, _, function = name.partition(":")
    known = names()
    if name in known or key in known or not function:
        found = registry.get("data", name if name in known else key)
        assert isinstance(found, Source)
        return found
    try:
        return Own("data", name, registry.imported(name))
    except ValueError as error:
        raise registry.unknown("data", name, f", and {error}") from None


def load(name: str, data_dir: Path | str | None = None, **options: Any) -> Dataset | Datasets:
    """Read a data set from its files.

    Args:
        name: A registered name, or `package.module:function`.
        data_dir: The data folder; by default the environment variable `FEDFACTOR_DATA`, or else a folder in the user's
            cache.
        options: The options of the loader, and for images `norm`, `crop`, `flip` and `rotate` (see `Dataset`).
    """
    found = checked_source(name, options)
    picture = {key: options.pop(key) for key in PICTURE if key in options}
    picture = {key: value for key, value in picture.items() if value != PICTURE[key]}
    folder = data_folder(data_dir)
    read = found.read(name, folder, options)
    if isinstance(read, Datasets):
        if picture:
            raise ValueError(
                f"{name} returns datasets, which transform their examples themselves: remove {min(picture)}"
            )
        return read
    loaded = dataclasses.replace(read, **picture)
    if not len(loaded.train[1]):
        raise ValueError(f"{name} has no training examples: its files in {folder} are empty, or have another layout")
    return loaded


def checked_source(name: str, options: Mapping[str, Any]) -> Source:
    """Return what is known about a data set. Raise ValueError if it does not take these options, or needs others."""
    found = info(name)
    legal = {**found.options, **PICTURE}
    for key in options:
        if key not in legal and not found.takes_any:
            hint = near(key, legal)
            raise ValueError(f"{found.name} has no option {key!r}; {hint}it has {', '.join(legal) or 'none'}")
    for key in found.required:
        if key not in options:
            raise ValueError(f"{found.name} needs {key}, which has no default")
    return found


def data_folder(data_dir: Path | str | None = None) -> Path:
    """Return the folder that holds the files of data sets; it may not exist."""
    chosen = data_dir or os.environ.get(VARIABLE)
    return Path(chosen).expanduser() if chosen else user_folder()


def user_folder() -> Path:
    """Return the default folder, in the user's cache."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "fedfactor" / "data"


def check_whole(name: str, folder: Path, found: Mapping[str, tuple[int, int]], partial: bool) -> None:
    """Raise ValueError if a data set does not have the size that its authors gave it, unless `partial` accepts that.

    `found` maps what is counted to how many there are and how many there should be.
    """
    wrong = [f"{here:,} of {whole:,} {what}" for what, (here, whole) in found.items() if here != whole]
    if wrong and not partial:
        fetch = info(name).fetch.format(data=folder)
        raise ValueError(
            f"{name} in {folder} is incomplete: it has {', '.join(wrong)}; fetch it again with `{fetch}`, or set "
            "data.partial = true (in Python partial=True) to use what is there"
        )


def missing(name: str, folder: Path, looked: list[Path]) -> MissingData:
    """Return the error for a data set whose files were found in none of the places."""
    places = " or ".join(str(place) for place in looked if not place.exists()) or " or ".join(map(str, looked))
    fetch = info(name).fetch.format(data=folder)
    how = f"fetch it with `{fetch}`, or " if fetch else ""
    return MissingData(
        f"{name} was looked for in {places} and not found; {how}set the data folder with --data-dir or {VARIABLE}"
    )
