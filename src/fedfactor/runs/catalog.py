"""The recipes that come with the package, found by name: `demo`, `fedpara/table12`."""

from __future__ import annotations

import re
from pathlib import Path

from fedfactor.support.checks import near

RECIPES = Path(__file__).parents[1] / "recipes"


def names() -> list[str]:
    """Return the names of all packaged recipes, sorted."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.toml"))


def packaged(name: str) -> Path:
    """Return the file of a packaged recipe. Raise ValueError if there is no recipe of this name."""
    if name not in names():
        hint = near(name.removeprefix("recipes/").removesuffix(".toml"), names(), " (did you mean {!r}?)")
        raise ValueError(f"no packaged recipe is called {name!r}{hint}; `fedfactor recipes` lists them")
    return RECIPES / f"{name}.toml"


def find(recipe: Path) -> Path:
    """Return a recipe's file: the file itself if it exists, otherwise the packaged recipe of this name."""
    if recipe.is_file():
        return recipe
    try:
        return packaged(recipe.as_posix())
    except ValueError as error:
        raise ValueError(f"there is no file {recipe}, and {error}") from None


def description(name: str) -> str:
    """Return the first sentence of the comment at the head of a packaged recipe."""
    head = re.match("(#.*\n)*", packaged(name).read_text(encoding="utf-8"))
    words = " ".join(line.removeprefix("#").strip() for line in head[0].splitlines()) if head else ""
    return re.split(r'(?<=\.) (?=[A-Z`"])', words, maxsplit=1)[0]
