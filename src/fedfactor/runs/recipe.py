"""Recipes: a TOML file becomes checked settings, with every default written out.

A wrong key, type or value is one sentence that names the key, what is legal and the nearest match. The section
`[paper]` is free-form: what the paper prints for this recipe, kept beside what is measured.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import itertools
import re
import tomllib
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w
from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedfactor import models
from fedfactor.checks import near
from fedfactor.data import NORMS, resolved_data, resolved_partition
from fedfactor.data.partitions import kinds
from fedfactor.data.sources.registry import PICTURE_TYPES
from fedfactor.data.sources.registry import info as source_of
from fedfactor.protocol.settings import Capacities, Rounds, Schedule, Training
from fedfactor.registry import KINDS, create, entries

Table = dict[str, Any]
Settings = TypeVar("Settings")

HINT = " (did you mean {!r}?)"

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
class SharedOptions:
    """Options of every partition: its seed, which part of it is used, and the clients' own test data."""

    seed: int = 0
    take: int = 0
    train_share: float = 1.0
    own_test: bool = True
    test_share: float = 0.2
    test_limit: int = 0


@dataclasses.dataclass(frozen=True)
class EvaluateTable:
    """What is measured and when; see `settings.Rounds`."""

    every: int = Rounds.evaluate_every
    clients: Literal["none", "selected", "all"] = Rounds.evaluate_clients
    limit: int = Rounds.evaluate_limit
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
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (FileNotFoundError, IsADirectoryError):
        raise RecipeError(f"there is no recipe {path}; a recipe is a TOML file") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not TOML: {error}") from None


def parse(text: str, where: str) -> Table:
    """Read the text of a recipe as plain tables; `where` is what mistakes are said of."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{where} is not TOML: {error}") from None


def override(tables: Table, assignments: list[str]) -> Table:
    """Apply `section.key=value` assignments; values are TOML, or else plain words."""
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
    if not isinstance(tables.get("small"), dict):
        raise RecipeError("this recipe has no [small] section")
    return merged({k: v for k, v in tables.items() if k != "small"}, tables["small"])


def cells(tables: Table) -> dict[str, Table]:
    """Return the recipes that a sweep stands for, by name; one without a sweep is its own only cell.

    `[sweep]` maps keys (`train.lr`) to lists, and the cells are their product; `[[sweep.cases]]` lists named
    overlays to combine them with.
    """
    base = {key: value for key, value in tables.items() if key != "sweep"}
    sweep = _dotted(tables.get("sweep", {}))
    if not all(isinstance(values, list) for values in sweep.values()):
        raise RecipeError("[sweep] maps keys to lists, such as train.lr = [0.1, 0.2], and cases to a list of overlays")
    cases = sweep.pop("cases", [{}])
    if not all(isinstance(case, dict) and isinstance(case.get("name", ""), str) for case in cases):
        raise RecipeError("[[sweep.cases]] are overlays, each with a name of its own")
    if "sweep" not in tables:
        return {str(base.get("name", "run")): base}
    found: dict[str, Table] = {}
    for case in cases:
        overlay = {key: value for key, value in case.items() if key != "name"}
        for values in itertools.product(*sweep.values()):
            pairs = list(zip(sweep, values, strict=True))
            parts = [case.get("name", ""), *(f"{key.rpartition('.')[2]}={value}" for key, value in pairs)]
            label = "-".join(part for part in parts if part).replace("/", "-")  # it names a directory
            if not label or label in found:
                raise RecipeError(f"every cell of a sweep needs a name of its own: {label!r} is none, or taken")
            cell = merged(base, overlay)
            for key, value in pairs:
                cell = merged(cell, _nested(key, value))
            found[label] = cell
    if not found:
        raise RecipeError("[sweep] stands for no cell at all: one of its lists is empty")
    return found


def overridden_cells(tables: Table, assignments: list[str]) -> dict[str, Table]:
    """Return the cells of a recipe with overrides applied to each; what a sweep varies cannot be overridden."""
    for assignment in assignments:
        key = assignment.partition("=")[0].strip()
        if key in _dotted(tables.get("sweep", {})):
            raise RecipeError(f"--set {assignment}: the sweep varies {key}; choose cells with --only")
    first = [assignment for assignment in assignments if assignment.startswith("sweep.")]
    rest = [assignment for assignment in assignments if assignment not in first]
    return {name: override(cell, rest) for name, cell in cells(override(tables, first)).items()}


def _dotted(table: Any, prefix: str = "") -> Table:
    """Flatten tables within tables: `{"train": {"lr": [...]}}` says the same as `{"train.lr": [...]}`."""
    if not isinstance(table, dict):
        return {prefix.removesuffix("."): table}
    return {key: value for name, inner in table.items() for key, value in _dotted(inner, f"{prefix}{name}.").items()}


def _nested(key: str, value: Any) -> Table:
    head, _, rest = key.partition(".")
    return {head: _nested(rest, value)} if rest else {head: value}


def resolve(tables: Table, where: str = "recipe") -> Recipe:
    """Check tables and fill in every default."""
    _known(where, "", tables, SECTIONS)
    if "sweep" in tables:
        raise RecipeError(f"{where} is a sweep of {len(cells(tables))} cells; take one of them")
    _section(where, "small", tables)
    name = tables.get("name", "run")
    if not isinstance(name, str) or Path(name).name != name:
        raise RecipeError(f"{where}: name should be a word that can name a directory, got {name!r}")
    train = _training(where, tables)
    rounds = _rounds(where, tables)
    capacity = _checked(where, "capacities", CapacityTable, tables.get("capacities", {}))
    if len(capacity.levels) != len(capacity.shares) or len(set(capacity.levels)) != len(capacity.levels):
        raise RecipeError(f"{where}: capacities.levels must differ, and capacities.shares have one value for each")
    kept = _checked(where, "run", RunTable, tables.get("run", {}))
    if not all(0 <= number <= rounds.rounds for number in kept.keep_rounds):
        raise RecipeError(
            f"{where}: run.keep_rounds: should be rounds between 0 and train.rounds, {rounds.rounds}, got "
            f"{list(kept.keep_rounds)}"
        )
    parts = {kind: _part(where, kind, tables) for kind in KINDS}
    resolved: Table = {
        "name": name,
        "data": _data(where, tables),
        "partition": _partition(where, tables),
        "model": _model(where, tables),
        **{kind.removesuffix("s"): _part_table(part) for kind, part in parts.items()},
        "train": {**_table(train), **{key: getattr(rounds, key) for key in COHORT}},
        "capacities": _table(capacity),
        "evaluate": _table(_checked(where, "evaluate", EvaluateTable, _section(where, "evaluate", tables))),
        "run": _table(kept),
        "paper": _section(where, "paper", tables),
    }
    capacities = _built(
        where,
        "capacities",
        lambda: Capacities(dict(zip(capacity.levels, capacity.shares, strict=True)), capacity.dynamic),
    )
    reason = parts["methods"].refuses(parts["optimizers"], parts["codecs"], train)
    if reason:
        raise RecipeError(f"{where}: {reason}")
    return Recipe(resolved, train, rounds, capacities, parts["methods"], parts["optimizers"], parts["codecs"])


def _training(where: str, tables: Table) -> Training:
    section = dict(_section(where, "train", tables))
    legal = [f.name for f in dataclasses.fields(Training)] + COHORT
    _known(where, "train", section, legal)
    if "seed" in section and "seed" in tables:
        raise RecipeError(f"{where}: seed and train.seed are the same setting; give one of them")
    chosen = section.pop("schedule", {})
    chosen = {"kind": chosen} if isinstance(chosen, str) else chosen  # one that needs no other settings
    schedule = _checked(where, "train.schedule", Schedule, chosen)
    mine = {key: value for key, value in section.items() if key not in COHORT}
    checked = _checked(where, "train", Training, {"seed": tables.get("seed", 0), **mine})
    return dataclasses.replace(checked, schedule=schedule)


def _rounds(where: str, tables: Table) -> Rounds:
    train = {key: value for key, value in _section(where, "train", tables).items() if key in COHORT}
    cohort = _checked(where, "train", CohortTable, train)
    measured = _checked(where, "evaluate", EvaluateTable, _section(where, "evaluate", tables))
    evaluated = _built(
        where,
        "evaluate",
        lambda: Rounds(
            evaluate_every=measured.every,
            evaluate_clients=measured.clients,
            evaluate_limit=measured.limit,
            target=measured.target,
            joules_per_byte=measured.joules_per_byte,
        ),
    )
    return _built(where, "train", lambda: dataclasses.replace(evaluated, **dataclasses.asdict(cohort)))


def _partition(where: str, tables: Table) -> Table:
    """Check a partition's options against its kind, and fill in the defaults."""
    section = _section(where, "partition", tables)
    known = kinds()
    kind = _word(where, "partition.kind", section.get("kind", "iid"))
    if kind in known:
        shared = [f.name for f in dataclasses.fields(SharedOptions)]
        options = {key: value for key, value in section.items() if key != "kind"}
        _known(where, "partition", options, [*shared, *(f.name for f in dataclasses.fields(known[kind]))])
        _checked(where, "partition", SharedOptions, {key: value for key, value in options.items() if key in shared})
        _checked(where, "partition", known[kind], {key: value for key, value in options.items() if key not in shared})
    return _built(where, "partition", lambda: resolved_partition(**section))


def _data(where: str, tables: Table) -> Table:
    """Check the options of a data set against its loader, and fill in the defaults."""
    section = _named(where, "data", tables)
    source = _built(where, "data", lambda: source_of(section["name"]))
    types = _types(source.loader)
    legal = {**{key: types[key] for key in source.options}, **PICTURE_TYPES}
    options = {key: value for key, value in section.items() if key != "name"}
    if not source.takes_any:
        _known(where, "data", options, legal)
    _typed(where, "data", legal, options)
    norm = options.get("norm", "")
    if isinstance(norm, str) and norm not in ("", *NORMS):
        raise RecipeError(
            f"{where}: data.norm: should be one of {', '.join(NORMS)}{near(norm, NORMS, HINT)}, got {norm!r}"
        )
    return _built(where, "data", lambda: resolved_data(**section))


def _model(where: str, tables: Table) -> Table:
    """Check a model's options against its builder, and fill in the defaults; `classes` comes from the data."""
    section = copy.deepcopy(_named(where, "model", tables))
    builder = builder_of(section["name"], where)
    legal, options = _types(builder), {key: value for key, value in section.items() if key != "name"}
    parameters = inspect.signature(builder).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        _known(where, "model", options, legal)
    _typed(where, "model", legal, options)
    for key, parameter in parameters.items():
        if key in legal and parameter.default is parameter.empty and key not in {*options, "classes", "width"}:
            raise RecipeError(f"{where}: model.{key} is missing: {section['name']} has no default for it")
    simple = {key: p.default for key, p in parameters.items() if isinstance(p.default, (bool, int, float, str))}
    return {**section, **{key: value for key, value in simple.items() if key not in section and key != "classes"}}


def _types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters of a function and their types as far as it says them."""
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, TypeError, SyntaxError):  # annotations of names that exist only for type checkers
        signature = inspect.signature(function)
    found: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        said = parameter.annotation
        if said is parameter.empty or isinstance(said, str):
            plain = isinstance(parameter.default, (bool, int, float, str))
            said = type(parameter.default) if plain else Any
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            found[parameter.name] = said
    return found


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
    name = _word(where, f"{single}.name", section.pop("name", default))
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
    if "name" not in section:
        raise RecipeError(f"{where}: {name}.name is missing: it says which {name} to take")
    _word(where, f"{name}.name", section["name"])
    return section


def _word(where: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RecipeError(f"{where}: {key}: should be a word, got {value!r}")
    return value


def _known(where: str, section: str, table: Mapping[str, Any], legal: typing.Iterable[str]) -> None:
    legal = list(legal)
    for key in table:
        if key not in legal:
            full = f"{section}.{key}".removeprefix(".")
            raise RecipeError(
                f"{where}: there is no key {full!r}; {near(key, legal)}legal are {', '.join(legal) or 'none'}"
            )


def _checked(where: str, section: str, cls: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Build a settings dataclass from a table, strictly typed."""
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where}: {section} must be a section, got {values!r}")
    _known(where, section, values, [f.name for f in dataclasses.fields(cls)])  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    checked = _typed(where, section, {f.name: hints[f.name] for f in dataclasses.fields(cls)}, values)  # type: ignore[arg-type]
    return _built(where, section, lambda: cls(**checked))


def _typed(where: str, section: str, types: Mapping[str, Any], values: Mapping[str, Any]) -> Table:
    """Check the values of a table, strictly, and return them with tuples where TOML has lists."""
    checked, wrong = {}, []
    for key, value in values.items():
        expected = TypeAdapter(types.get(key, Any), config=ConfigDict(strict=True, arbitrary_types_allowed=True))
        try:
            checked[key] = expected.validate_python(_tuples(value))
        except ValidationError as error:
            wrong.append(f"{section}.{key}: should be {_expected(error)}, got {value!r}")
    if wrong:
        raise RecipeError(f"{where}: {'; '.join(wrong)}")
    return checked


def _built(where: str, section: str, build: Callable[[], Settings]) -> Settings:
    try:
        return build()
    except ValueError as error:
        raise RecipeError(f"{where}: {section}: {error}") from None


def _expected(error: ValidationError) -> str:
    """Say in words what a value should have been: all the types it could have had."""
    words = []
    for item in error.errors():
        word = item["msg"].removeprefix("Input should be ").replace("a valid tuple", "a list")
        if item["type"] == "literal_error" and isinstance(item["input"], str):
            word += near(item["input"], re.findall("'([^']*)'", item["ctx"]["expected"]), HINT)
        words.append(word)
    return " or ".join(dict.fromkeys(words))


def _tuples(value: Any) -> Any:
    """TOML has lists where settings have tuples."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, (list, tuple)) else value
