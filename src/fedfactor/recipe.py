"""Recipes: a TOML file becomes checked settings, with every default written out.

A wrong key, type or value is one sentence that names the key, what is legal and the nearest match. The section
`[paper]` is free-form: what the paper prints for this recipe, kept beside what is measured.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib
import inspect
import itertools
import tomllib
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from fedfactor import models
from fedfactor.data import resolved_data, resolved_partition
from fedfactor.data.partitions import kinds
from fedfactor.registry import KINDS, create, entries
from fedfactor.settings import Capacities, Rounds, Schedule, Training

Table = dict[str, Any]
Settings = TypeVar("Settings")

SECTIONS = (
    "name", "seed", "data", "partition", "model", "method", "optimizer", "codec", "train", "capacities", "evaluate",
    "run", "paper", "small", "sweep",
)  # fmt: skip


class RecipeError(ValueError):
    """A recipe that cannot be run; the message names the key and what is legal."""


@dataclasses.dataclass(frozen=True)
class CapacityTable:
    """Levels in (0, 1], the share of clients that has each, and whether they are redrawn every round."""

    levels: tuple[float, ...] = (1.0,)
    shares: tuple[float, ...] = (1.0,)
    dynamic: bool = False


@dataclasses.dataclass(frozen=True)
class RunTable:
    """What the run directory keeps."""

    keep_rounds: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class OwnTest:
    """Options of every partition: its seed, and the clients' own test data."""

    seed: int = 0
    own_test: bool = True
    test_share: float = 0.2
    test_limit: int = 0


@dataclasses.dataclass(frozen=True)
class EvaluateTable:
    """What is measured and when; see `settings.Rounds`."""

    every: int = Rounds.evaluate_every
    clients: Literal["none", "selected", "all"] = Rounds.evaluate_clients
    target: float | None = Rounds.target
    joules_per_byte: float | None = Rounds.joules_per_byte


@dataclasses.dataclass(frozen=True)
class CohortTable:
    """The part of `[train]` that says how many rounds there are and who takes part; see `settings.Rounds`."""

    rounds: int = Rounds.rounds
    cohort: int | float = Rounds.cohort
    quorum: float = Rounds.quorum


COHORT = [f.name for f in dataclasses.fields(CohortTable)]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A resolved recipe: plain tables, complete and checked, and the objects they stand for."""

    tables: Table
    training: Training
    rounds: Rounds
    capacities: Capacities
    method: Any
    optimizer: Any
    codec: Any

    @property
    def keep_rounds(self) -> tuple[int, ...]:
        """Rounds whose checkpoint and private states are kept for later analysis."""
        return tuple(self.tables["run"]["keep_rounds"])

    def to_toml(self) -> str:
        """Write the resolved recipe."""
        return tomli_w.dumps(_without_none(self.tables))


def read(path: Path | str) -> Table:
    """Read a recipe file as plain tables."""
    path = Path(path)
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not TOML: {error}") from None


def override(tables: Table, assignments: list[str]) -> Table:
    """Apply `section.key=value` assignments; values are TOML, or else plain words."""
    changed = copy.deepcopy(tables)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"--set takes section.key=value, got {assignment!r}")
        *sections, last = key.strip().split(".")
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


def merged(tables: Table, overlay: Mapping[str, Any]) -> Table:
    """Lay one set of tables over another, key by key."""
    result = copy.deepcopy(tables)
    for key, value in overlay.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def small(tables: Table) -> Table:
    """Apply the recipe's own `[small]` overlay."""
    if "small" not in tables:
        raise RecipeError("this recipe has no [small] section")
    return merged({k: v for k, v in tables.items() if k != "small"}, tables["small"])


def cells(tables: Table) -> dict[str, Table]:
    """Return the recipes that a sweep stands for, by name; one without a sweep is its own only cell.

    `[sweep]` maps keys to lists, and the cells are their product; `[[sweep.cases]]` lists named overlays to combine
    them with.
    """
    base = {key: value for key, value in tables.items() if key != "sweep"}
    sweep = tables.get("sweep", {})
    if not isinstance(sweep, dict) or not all(isinstance(values, list) for values in sweep.values()):
        raise RecipeError(
            '[sweep] maps keys to lists, such as "train.lr" = [0.1, 0.2], and cases to a list of overlays'
        )
    sweep = dict(sweep)
    if not sweep:
        return {str(base.get("name", "run")): base}
    cases = sweep.pop("cases", [{}])
    found: dict[str, Table] = {}
    for case in cases:
        overlay = {key: value for key, value in case.items() if key != "name"}
        for values in itertools.product(*sweep.values()):
            pairs = list(zip(sweep, values, strict=True))
            label = "-".join(
                [*([case["name"]] if "name" in case else []), *[f"{k.rpartition('.')[2]}={v}" for k, v in pairs]]
            )
            cell = merged(base, overlay)
            for key, value in pairs:
                cell = merged(cell, _nested(key, value))
            found[label] = cell
    return found


def overridden_cells(tables: Table, assignments: list[str]) -> dict[str, Table]:
    """Return the cells of a recipe with overrides applied to each; what a sweep varies cannot be overridden."""
    swept = [key for key in tables.get("sweep", {}) if key != "cases"]
    for assignment in assignments:
        key = assignment.partition("=")[0].strip()
        if key in swept:
            raise RecipeError(f"--set {assignment}: the sweep varies {key}; choose cells with --only")
    first = [assignment for assignment in assignments if assignment.startswith("sweep.")]
    rest = [assignment for assignment in assignments if assignment not in first]
    return {name: override(cell, rest) for name, cell in cells(override(tables, first)).items()}


def _nested(key: str, value: Any) -> Table:
    head, _, rest = key.partition(".")
    return {head: _nested(rest, value)} if rest else {head: value}


def resolve(tables: Table, where: str = "recipe") -> Recipe:
    """Check tables and fill in every default."""
    _known(where, "", tables, SECTIONS)
    if "sweep" in tables:
        raise RecipeError(f"{where} is a sweep of {len(cells(tables))} cells; take one of them")
    train = _training(where, tables)
    rounds = _rounds(where, tables)
    capacity = _checked(where, "capacities", CapacityTable, tables.get("capacities", {}))
    if len(capacity.levels) != len(capacity.shares):
        raise RecipeError(f"{where}: capacities.levels and capacities.shares must be equally long")
    parts = {kind: _part(where, kind, tables) for kind in KINDS}
    resolved: Table = {
        "name": tables.get("name", "run"),
        "data": _built(where, "data", lambda: resolved_data(**_named(where, "data", tables))),
        "partition": _partition(where, tables),
        "model": _model(where, tables),
        **{kind.removesuffix("s"): _part_table(part) for kind, part in parts.items()},
        "train": {**_table(train), **{key: getattr(rounds, key) for key in COHORT}},
        "capacities": _table(capacity),
        "evaluate": _table(_checked(where, "evaluate", EvaluateTable, _section(where, "evaluate", tables))),
        "run": _table(_checked(where, "run", RunTable, tables.get("run", {}))),
        "paper": tables.get("paper", {}),
    }
    capacities = _built(
        where,
        "capacities",
        lambda: Capacities(dict(zip(capacity.levels, capacity.shares, strict=True)), capacity.dynamic),
    )
    _built(where, "method", lambda: parts["methods"].phases(train.epochs))
    reason = parts["methods"].refuses(parts["optimizers"], parts["codecs"], capacities.dynamic)
    if reason:
        raise RecipeError(f"{where}: {reason}")
    return Recipe(resolved, train, rounds, capacities, parts["methods"], parts["optimizers"], parts["codecs"])


def _training(where: str, tables: Table) -> Training:
    section = dict(_section(where, "train", tables))
    legal = [f.name for f in dataclasses.fields(Training)] + COHORT
    _known(where, "train", section, legal)
    if "seed" in section and "seed" in tables:
        raise RecipeError(f"{where}: seed and train.seed are the same setting; give one of them")
    schedule = _checked(where, "train.schedule", Schedule, section.pop("schedule", {}))
    mine = {key: value for key, value in section.items() if key not in COHORT}
    checked = _checked(where, "train", Training, {"seed": tables.get("seed", 0), **mine})
    return dataclasses.replace(checked, schedule=schedule)


def _rounds(where: str, tables: Table) -> Rounds:
    train = {key: value for key, value in _section(where, "train", tables).items() if key in COHORT}
    cohort = _checked(where, "train", CohortTable, train)
    measured = _checked(where, "evaluate", EvaluateTable, _section(where, "evaluate", tables))
    build = dict(
        **dataclasses.asdict(cohort),
        evaluate_every=measured.every,
        evaluate_clients=measured.clients,
        target=measured.target,
        joules_per_byte=measured.joules_per_byte,
    )
    return _built(where, "train", lambda: Rounds(**build))


def _partition(where: str, tables: Table) -> Table:
    """Check a partition's options against its kind, and fill in the defaults."""
    section = _section(where, "partition", tables)
    known = kinds()
    kind = section.get("kind", "iid")
    if kind in known:
        shared = [f.name for f in dataclasses.fields(OwnTest)]
        options = {key: value for key, value in section.items() if key != "kind"}
        _known(where, "partition", options, [*shared, *(f.name for f in dataclasses.fields(known[kind]))])
        _checked(where, "partition", OwnTest, {key: value for key, value in options.items() if key in shared})
        _checked(where, "partition", known[kind], {key: value for key, value in options.items() if key not in shared})
    return _built(where, "partition", lambda: resolved_partition(**section))


def _model(where: str, tables: Table) -> Table:
    """Check a model's options against its builder, and fill in the defaults; `classes` comes from the data."""
    section = copy.deepcopy(_named(where, "model", tables))
    parameters = inspect.signature(builder_of(section["name"], where)).parameters
    _known(where, "model", section, ["name", *parameters])
    for key, value in section.items():
        default = parameters[key].default if key != "name" else ""
        if isinstance(default, (bool, int, float, str)) and not _fits(value, default):
            raise RecipeError(f"{where}: model.{key}: input should be a {type(default).__name__}, got {value!r}")
    simple = {key: p.default for key, p in parameters.items() if isinstance(p.default, (bool, int, float, str))}
    return {**section, **{key: value for key, value in simple.items() if key not in section and key != "classes"}}


def _fits(value: Any, default: Any) -> bool:
    """Whether a value has the type of a default; whole numbers do for others."""
    return type(value) is type(default) or (type(default) is float and type(value) is int)


def builder_of(name: str, where: str = "recipe") -> Callable[..., Any]:
    """Return what builds a model: one of ours by name, or `package.module:function`."""
    if ":" not in name:
        return _built(where, "model", lambda: models.info(name).builder)
    module, _, attribute = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RecipeError(f"{where}: model.name {name!r} cannot be imported: {error}") from None
    return found


def _part(where: str, kind: str, tables: Table) -> Any:
    single = kind.removesuffix("s")
    default = {"methods": "fedavg", "optimizers": "fedavg", "codecs": "float32"}[kind]
    section = dict(_section(where, single, tables))
    name = section.pop("name", default)
    if not isinstance(name, str):
        raise RecipeError(f"{where}: {single}.name must be a word, got {name!r}")
    known = entries(kind)
    if name in known:
        return _checked(where, single, known[name].cls, section)
    return _built(where, single, lambda: create(kind, name))


def _part_table(part: Any) -> Table:
    return {"name": part.name, **_table(part)}


def _table(settings: Any) -> Table:
    table = dataclasses.asdict(settings)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in table.items()}


def _section(where: str, name: str, tables: Table) -> Table:
    section = tables.get(name, {})
    if not isinstance(section, dict):
        raise RecipeError(f"{where}: {name} must be a section, got {section!r}")
    return section


def _named(where: str, name: str, tables: Table) -> Table:
    """Return a section that must say what it is about."""
    section = _section(where, name, tables)
    if not isinstance(section.get("name"), str):
        raise RecipeError(f"{where}: {name}.name is missing: it says which {name} to take")
    return section


def _known(where: str, section: str, table: Mapping[str, Any], legal: typing.Iterable[str]) -> None:
    legal = list(legal)
    for key in table:
        if key not in legal:
            full = f"{section}.{key}".removeprefix(".")
            near = difflib.get_close_matches(key, legal, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RecipeError(f"{where}: there is no key {full!r}; {hint}legal are {', '.join(legal) or 'none'}")


def _checked(where: str, section: str, cls: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Build a settings dataclass from a table, strictly typed."""
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where}: {section} must be a section, got {values!r}")
    _known(where, section, values, [f.name for f in dataclasses.fields(cls)])  # type: ignore[arg-type]
    try:
        checked = _schema(cls).model_validate(_tuples(values))
    except ValidationError as error:
        raise RecipeError(f"{where}: " + "; ".join(_sentence(section, item) for item in error.errors())) from None
    return _built(where, section, lambda: cls(**{key: getattr(checked, key) for key in values}))


def _built(where: str, section: str, build: Callable[[], Settings]) -> Settings:
    try:
        return build()
    except ValueError as error:
        raise RecipeError(f"{where}: {section}: {error}") from None


def _schema(cls: type[Any]) -> type[BaseModel]:
    hints = typing.get_type_hints(cls)
    fields: dict[str, Any] = {f.name: (hints[f.name], None) for f in dataclasses.fields(cls)}
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    return create_model(cls.__name__, __config__=config, **fields)


def _sentence(section: str, item: Any) -> str:
    key = ".".join([section, *(str(part) for part in item["loc"] if isinstance(part, str) and part.islower())])
    return f"{key}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}"


def _tuples(value: Any) -> Any:
    """TOML has lists where settings have tuples."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, (list, tuple)) else value
