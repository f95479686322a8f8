"""Settings that are tried for each method of a comparison on validation data, and the choice among them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote

from fedfactor.runs.recipe import RecipeError, values
from fedfactor.task import ACCURACY, Decider

Settings = Mapping[str, Any]
"""Values by key, such as `{"train.lr": 0.1}`."""

FILE = "tuning.json"
"""The file in which the runs of a tuned method have its `Tuning`."""
SHARE = 0.2
"""Share of each client's training examples that tuning holds out, if neither recipe nor command says otherwise."""


@dataclass(frozen=True)
class Search:
    """How settings are chosen."""

    tune: Sequence[str] = ()
    """`section.key=value,value` for all methods, or `METHOD:section.key=value,value` for one. Several make a grid."""
    rounds: int | None = None
    """Rounds of each run. Default: the recipe's."""
    share: float | None = None
    """Share of each client's training examples to hold out. Default: the recipe's `validation_share`, or 0.2."""

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share < 1:
            raise RecipeError(f"the share to hold out for tuning must lie in (0, 1), got {self.share:g}")


@dataclass(frozen=True)
class Candidate:
    """Settings that were tried, and their score on validation data."""

    settings: Settings
    score: float | None
    """The deciding metric after the last round. None: the run diverged or failed."""
    diverged: bool = False
    failure: str = ""

    def __str__(self) -> str:
        """Return the settings as text."""
        return written(self.settings)


@dataclass(frozen=True)
class Tuning:
    """What was tried for one method, and how."""

    measured: str
    """The measurement by which candidates are compared: see `RANKING`."""
    rounds: int
    seed: int
    validation_share: float
    candidates: tuple[Candidate, ...]
    metric: Decider = ACCURACY

    @property
    def failure(self) -> str:
        """Why nothing can be chosen; empty if something can."""
        for one in self.candidates:
            if one.failure and not one.diverged:
                return f"tuning failed with {one}: {one.failure}"
        if all(one.diverged for one in self.candidates):
            tried = "; ".join(map(str, self.candidates))
            return f"all candidates of its tuning diverged ({tried}); add other values, such as smaller learning rates"
        return ""

    @property
    def chosen(self) -> Candidate:
        """The candidate with the best score; among equals, the first. Raises ValueError if nothing was chosen."""
        if self.failure:
            raise ValueError(self.failure)
        scored = [(one, one.score) for one in self.candidates if one.score is not None and not one.diverged]
        return max(scored, key=lambda pair: self.metric.goodness(pair[1]))[0]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"chosen": None if self.failure else self.chosen.settings, **asdict(self)}


def written(settings: Settings, separator: str = ", ") -> str:
    """Return settings as text: `train.lr=0.1, method.gamma=0.5`."""
    pairs = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in settings.items())
    return separator.join(f"{key}={value}" for key, value in pairs)


def directory_name(settings: Settings) -> str:
    """Return a name of a directory that no other settings have."""
    return quote(written(settings, ","), safe="=,[] ")


def split_settings(
    labels: Sequence[str], settings: Sequence[str], option: str = "--set"
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the settings for all methods, and those for one, such as `fedpara:train.lr=0.1`, by label."""
    shared: list[str] = []
    own: dict[str, list[str]] = {label: [] for label in labels}
    for assignment in settings:
        label, colon, key = key_of(assignment).rpartition(":")
        if not colon and key.startswith("method."):
            raise RecipeError(
                f"{option} {assignment}: methods have different fields; name the method, as in "
                f"{option} {labels[0]}:{assignment}"
            )
        if colon and label not in own:
            raise RecipeError(f"{option} {assignment}: {label!r} is none of the compared methods, {', '.join(labels)}")
        (own[label] if colon else shared).append(assignment[len(label + colon) :])
    return shared, own


def key_of(assignment: str) -> str:
    """Return the key of `key=value`."""
    return assignment.partition("=")[0].strip()


def grid(
    labels: Sequence[str], tune: Sequence[str], settings: Sequence[str], same: Sequence[str]
) -> dict[str, list[Settings]]:
    """Return the candidates of each label that is tuned: all combinations of the values of its keys.

    Values for one method replace those for all, and a setting for one method takes a key that is tuned for all out of
    its grid. `same` are the keys and sections that methods of a comparison must share, which cannot be tuned.
    """
    (shared, own), (set_shared, set_own) = split_settings(labels, tune, "--tune"), split_settings(labels, settings)
    found: dict[str, list[Settings]] = {}
    for_all = _lists(shared, set_shared, same)
    for label in labels:
        fixed = {key_of(assignment) for assignment in set_own[label]}
        lists = {key: some for key, some in for_all.items() if key not in fixed}
        lists |= _lists(own[label], set_own[label], same)
        if lists:
            found[label] = [dict(zip(lists, some, strict=True)) for some in itertools.product(*lists.values())]
    return found


def _lists(tune: Sequence[str], settings: Sequence[str], same: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values to try by key."""
    fixed, found = {key_of(assignment) for assignment in settings}, dict[str, list[Any]]()
    for assignment in tune:
        key, some = key_of(assignment), values(assignment.partition("=")[2])
        if len(some) < 2 or len({written({key: value}) for value in some}) < len(some) or not all(key.split(".")):
            raise RecipeError(
                f"--tune takes section.key=value,value,... with at least two different values, got {assignment!r}"
            )
        if key == "seed" or any(f"{key}.".startswith(f"{one}.") for one in same):
            raise RecipeError(f"--tune {assignment}: {key} must be the same for all methods, so it cannot be tuned")
        if key in found or key in fixed:
            raise RecipeError(f"--tune {assignment}: {key} is given twice; tune it once, and do not set it as well")
        found[key] = some
    return found
