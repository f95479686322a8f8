"""Recipes: read a TOML file, apply overrides, expand a sweep, and resolve it to settings with all defaults.

`sections` says what each section may hold. The section `[paper]` is free-form: it holds what the paper prints for a
recipe, to be shown beside what was measured.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedfactor.data.federated import SHARED
from fedfactor.nn import Tune
from fedfactor.protocol.aggregation import MEAN, Aggregation
from fedfactor.protocol.attack import Attack
from fedfactor.protocol.buffering import SYNCHRONOUS, Buffering
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.fleet import Fleet
from fedfactor.protocol.local_optimizer import SHORT, LocalOptimizer
from fedfactor.protocol.method import Method
from fedfactor.protocol.optimizer import Optimizer
from fedfactor.protocol.privacy import Privacy
from fedfactor.protocol.settings import Capacities, Rounds, Schedule, Training
from fedfactor.protocol.setup import cannot_tune
from fedfactor.registry import create, entries
from fedfactor.runs.sections import (
    MEASURING,
    OBJECTS,
    TAKING_PART,
    CapacitiesTable,
    RecipeError,
    Table,
    built,
    metrics_of,
    read_sections,
    schema,
)
from fedfactor.task.metrics import Metrics

__all__ = [
    "Recipe", "RecipeError", "Table", "cells", "described", "merged", "nested", "overridden_cells", "override", "parse",
    "read", "recorded", "resolve", "schema", "small", "values", "with_base",
]  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe: plain tables with all defaults, and the objects that they describe."""

    tables: Table
    training: Training
    rounds: Rounds
    capacities: Capacities
    method: Method
    optimizer: Optimizer
    codec: Codec
    tune: Tune | None = None
    fleet: Fleet | None = None
    aggregation: Aggregation = MEAN
    attack: Attack | None = None
    buffering: Buffering = SYNCHRONOUS
    privacy: Privacy | None = None

    @property
    def from_python(self) -> bool:
        """Whether model and data are Python objects, for which the recipe has no sections."""
        return "data" not in self.tables

    @property
    def keep_rounds(self) -> tuple[int, ...]:
        """Rounds whose checkpoint and private states are kept for later analysis."""
        return tuple(self.tables["run"]["keep_rounds"])

    def to_toml(self) -> str:
        """Return the resolved recipe as TOML."""
        head = "# Started from Python: the model and the data were Python objects.\n" if self.from_python else ""
        return head + tomli_w.dumps(self.tables)


def read(path: Path | str) -> Table:
    """Read a recipe file as plain tables. Raise RecipeError if there is no such file or if it is not TOML."""
    path = Path(path)
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (FileNotFoundError, IsADirectoryError):
        raise RecipeError(f"there is no recipe {path}; a recipe is a TOML file") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not TOML: {error}") from None


def parse(text: str, where: str) -> Table:
    """Read the text of a recipe as plain tables. Errors name the recipe by `where`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where} is not TOML: {error}") from None


def override(tables: Table, assignments: list[str]) -> Table:
    """Return tables with `section.key=value` assignments applied; a value that is not TOML is taken as a string."""
    changed = copy.deepcopy(tables)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        *sections, last = [part.strip() for part in key.split(".")]
        if not equals or not all([*sections, last]):
            raise RecipeError(f"--set takes section.key=value, got {assignment!r}")
        table = changed
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise RecipeError(f"--set {assignment}: {section} is a value, not a section")
        table[last] = _value(text.strip())
    return changed


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def values(text: str) -> list[Any]:
    """Read values that are separated by commas: `0.1, 0.2`, `[1, 2], [3, 4]` or `constant, cosine`."""
    try:
        found: list[Any] = tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:
        return [_value(word.strip()) for word in text.split(",")]
    return found


def merged(tables: Table, overlay: Mapping[str, Any]) -> Table:
    """Return tables with an overlay applied key by key."""
    result = copy.deepcopy(tables)
    for key, value in overlay.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def small(tables: Table) -> Table:
    """Return tables with their own `[small]` section applied to the others."""
    if not isinstance(tables.get("small"), dict):
        raise RecipeError("this recipe has no [small] section")
    return merged(_without(tables, "small"), tables["small"])


def _without(table: Table, *keys: str) -> Table:
    return {key: value for key, value in table.items() if key not in keys}


def cells(tables: Table) -> dict[str, Table]:
    """Return the recipes of a sweep by name; a recipe without `[sweep]` is its own only cell.

    `[sweep]` maps keys such as `train.lr` to lists, and `[[sweep.cases]]` lists named overlays. There is one cell for
    each combination of a case and one value per list.
    """
    base = _without(tables, "sweep")
    sweep = _dotted(tables.get("sweep", {}))
    if not all(isinstance(values, list) for values in sweep.values()):
        raise RecipeError("[sweep] maps keys to lists, such as train.lr = [0.1, 0.2], and cases to a list of overlays")
    cases = sweep.pop("cases", [{}])
    if not all(isinstance(case, dict) and isinstance(case.get("name", ""), str) for case in cases):
        raise RecipeError("each of [[sweep.cases]] should be a table of overlays whose name is a string")
    if "sweep" not in tables:
        return {str(base.get("name", "run")): base}
    found: dict[str, Table] = {}
    for case in cases:
        overlay = _without(case, "name")
        for values in itertools.product(*sweep.values()):
            pairs = list(zip(sweep, values, strict=True))
            parts = [case.get("name", ""), *(f"{key.rpartition('.')[2]}={value}" for key, value in pairs)]
            label = "-".join(part for part in parts if part).replace("/", "-")  # it names a directory
            if not label or label in found:
                raise RecipeError(f"each cell of a sweep needs a name of its own: {label!r} is empty or used twice")
            cell = merged(base, overlay)
            for key, value in pairs:
                cell = merged(cell, nested(key, value))
            found[label] = cell
    if not found:
        raise RecipeError("[sweep] has no cells: one of its lists is empty")
    return found


def overridden_cells(tables: Table, assignments: list[str]) -> dict[str, Table]:
    """Return the cells of a recipe with overrides applied to each. Keys that the sweep varies cannot be overridden."""
    for assignment in assignments:
        key = assignment.partition("=")[0].strip()
        if key in _dotted(tables.get("sweep", {})):
            raise RecipeError(f"--set {assignment}: the sweep varies {key}; choose cells with --only")
    first = [assignment for assignment in assignments if assignment.startswith("sweep.")]
    rest = [assignment for assignment in assignments if assignment not in first]
    return {name: override(cell, rest) for name, cell in cells(override(tables, first)).items()}


def _dotted(table: Any, prefix: str = "") -> Table:
    """Flatten nested tables: `{"train": {"lr": [...]}}` means the same as `{"train.lr": [...]}`."""
    if not isinstance(table, dict):
        return {prefix.removesuffix("."): table}
    return {key: value for name, inner in table.items() for key, value in _dotted(inner, f"{prefix}{name}.").items()}


def nested(key: str, value: Any) -> Table:
    """Return tables with one value: `nested("train.lr", 0.1)` is `{"train": {"lr": 0.1}}`."""
    head, _, rest = key.partition(".")
    return {head: nested(rest, value)} if rest else {head: value}


def recorded(path: Path) -> Recipe:
    """Return the recipe that a run directory records, given the path of its `recipe.toml`."""
    tables = read(path)
    return resolve(tables, str(path), from_python="data" not in tables)


def with_base(recipe: Recipe, sha256: str) -> Recipe:
    """Return a recipe that names the frozen base of its model by its SHA-256, if it has one."""
    if recipe.from_python or not sha256:
        return recipe
    return dataclasses.replace(recipe, tables=merged(recipe.tables, {"model": {"base_sha256": sha256}}))


def described(
    name: str,
    training: Training,
    rounds: Rounds,
    capacities: Capacities,
    method: Method,
    optimizer: Optimizer,
    codec: Codec,
    metrics: Table,
    tune: Tune | None = None,
    fleet: Fleet | None = None,
    aggregation: Aggregation = MEAN,
    attack: Attack | None = None,
    buffering: Buffering = SYNCHRONOUS,
    privacy: Privacy | None = None,
) -> Recipe:
    """Return the recipe of a run from Python, which describes everything except its model and data.

    `metrics` are the keys of `[evaluate]` that choose metrics.
    """
    given = dataclasses.asdict(rounds)
    optional: dict[str, Any] = {"tune": tune, "fleet": fleet, "attack": attack, "privacy": privacy}
    optional["aggregation"] = aggregation if aggregation != MEAN else None
    optional["rounds"] = buffering if buffering.buffered else None
    tables = {
        "name": name,
        "method": _chosen("methods", method),
        "optimizer": _chosen("optimizers", optimizer),
        "codec": _chosen("codecs", codec),
        "train": {**dataclasses.asdict(training), **_settled(training), **{key: given[key] for key in TAKING_PART}},
        "capacities": {
            **{key: getattr(capacities, key) for key in CapacitiesTable.model_fields},
            "shares": [capacities.shares[level] for level in capacities.levels],
        },
        "evaluate": {**metrics, **{key: given[field] for key, field in MEASURING.items()}},
        **{name: dataclasses.asdict(part) for name, part in optional.items() if part},
        "run": {"keep_rounds": []},
        "paper": {},
    }
    parts = (method, optimizer, codec, tune, fleet, aggregation, attack, buffering, privacy)
    return Recipe(_plain(tables), training, rounds, capacities, *parts)


def _chosen(kind: str, part: Any) -> Table:
    """Return the section that chooses an object: the name under which it is registered or imported, and its fields."""
    known, cls = entries(kind).get(part.name), type(part)
    name = part.name if known and known.cls is cls else f"{cls.__module__}:{cls.__qualname__}"
    return {"name": name, **dataclasses.asdict(part)}


def _plain(value: Any) -> Any:
    """Return a value as TOML can write it: without `None`, and with the text of what it does not know."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _settled(training: Training) -> Table:
    """Return the settings of `[train]` with defaults that depend on others, as a recipe writes them."""
    found = {key: getattr(training, key) for key in ("epochs", "local_steps", *SHORT)}
    return _plain({**found, "optimizer": training.local_optimizer.table()})  # type: ignore[no-any-return]


def resolve(tables: Table, where: str = "recipe", *, from_python: bool = False) -> Recipe:
    """Check tables and fill in the defaults. Errors name the recipe by `where`.

    With `from_python`, the recipe has no sections for model and data: see `described`.
    """
    if "sweep" in tables:
        raise RecipeError(f"{where} is a sweep of {len(cells(tables))} cells; choose one of them")
    sections = read_sections(tables, where, [*(OBJECTS if from_python else ()), *({"tune"} - {*tables})])
    name = dict(sections.pop(""))["name"]
    written = {section: model.model_dump(mode="json", exclude_none=True) for section, model in sections.items()}
    written["train"]["schedule"] = written.pop("schedule")
    del written["local optimizer"]
    given = {section: dict(model) for section, model in sections.items()}
    train, capacities = given["train"], given["capacities"]
    rounds = Rounds(
        **{key: train.pop(key) for key in TAKING_PART},
        **{field: given["evaluate"][key] for key, field in MEASURING.items()},
    )
    written["evaluate"]["every"] = rounds.evaluate_every  # the default depends on the number of rounds
    chosen = {key: value for key, value in given["local optimizer"].items() if value is not None}
    parts = {"schedule": Schedule(**given["schedule"]), "optimizer": LocalOptimizer.of(chosen)}
    training = built(where, lambda: Training(**{**train, **parts}))
    written["train"] |= _settled(training)  # defaults that depend on other settings
    late = [number for number in given["run"]["keep_rounds"] if number > rounds.rounds]
    if late:
        raise RecipeError(f"{where}: run.keep_rounds should be at most train.rounds, {rounds.rounds}, got {late}")
    if not from_python:
        partition = given["partition"]
        own = _without(partition, "kind", *SHARED)
        built(f"{where}: partition", lambda: create("partitions", partition["kind"], **own))
        built(f"{where}: evaluate.metrics", lambda: Metrics("custom", metrics_of(given["evaluate"])["metrics"]))
    method: Method = built(f"{where}: method", lambda: create("methods", **given["method"]))
    optimizer: Optimizer = built(f"{where}: optimizer", lambda: create("optimizers", **given["optimizer"]))
    codec: Codec = built(f"{where}: codec", lambda: create("codecs", **given["codec"]))
    tune = built(f"{where}: tune", lambda: Tune(**given["tune"])) if "tune" in given else None
    reason = cannot_tune(method) if tune and method.untunable else method.refuses(optimizer, codec, training)
    privacy = built(f"{where}: privacy", lambda: Privacy(**given["privacy"])) if "privacy" in given else None
    if privacy:
        written["privacy"]["sampling"] = privacy.sampling  # the default depends on `where`
        reason = reason or privacy.refuses(method, optimizer)
    if reason:
        raise RecipeError(f"{where}: {reason}")
    shares = dict(zip(capacities["levels"], capacities["shares"], strict=True))
    tables = {"name": name, **written, "paper": tables.get("paper", {})}
    levels = built(f"{where}: capacities", lambda: Capacities(shares, capacities["dynamic"], capacities["cover"]))
    described = {key: value for key, value in given.get("fleet", {}).items() if key != "file"}
    fleet = built(where, lambda: Fleet(**described)) if described else None
    aggregation = built(f"{where}: aggregation", lambda: Aggregation(**given.get("aggregation", {})))
    attack = built(f"{where}: attack", lambda: Attack(**given["attack"])) if "attack" in given else None
    buffering = built(f"{where}: rounds", lambda: Buffering(**given.get("rounds", {})))
    chosen_parts = (method, optimizer, codec, tune, fleet, aggregation, attack, buffering, privacy)
    return Recipe(tables, training, rounds, levels, *chosen_parts)
