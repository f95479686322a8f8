"""What each section of a recipe may hold: one pydantic model per section, and a JSON Schema for editors.

Sections that choose something by name (`[data]`, `[partition]`, `[model]`, `[method]`, `[optimizer]`, `[codec]`) have
the options of what is chosen: the fields of a dataclass, or the parameters of a function.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import operator
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from fedfactor.data import federated
from fedfactor.data.clients import Kind
from fedfactor.data.federated import SHARED
from fedfactor.data.sources.registry import PICTURE, PICTURE_TYPES
from fedfactor.data.sources.registry import info as source_of
from fedfactor.nn import Tune
from fedfactor.protocol.aggregation import Aggregation
from fedfactor.protocol.attack import Attack
from fedfactor.protocol.buffering import Buffering
from fedfactor.protocol.fleet import Fleet
from fedfactor.protocol.local_optimizer import NAMES, SHORT, LocalOptimizer, torch_class
from fedfactor.protocol.privacy import Privacy
from fedfactor.protocol.sentences import sentence
from fedfactor.protocol.settings import CONFIG, Capacities, Count, Level, Rounds, Schedule, Share, Training
from fedfactor.registry import Entry, entries, get, imported
from fedfactor.runs.devices import read_devices

Table = dict[str, Any]
Built = TypeVar("Built")
Fields = dict[str, Any]
"""The fields of a model as `create_model` takes them: a type and a `FieldInfo` by name."""

CHOICES = {
    "data": ("data", "name", None),
    "partition": ("partitions", "kind", "iid"),
    "model": ("models", "name", None),
    "method": ("methods", "name", "fedavg"),
    "optimizer": ("optimizers", "name", "fedavg"),
    "codec": ("codecs", "name", "float32"),
    "local optimizer": ("", "name", "sgd"),
}
"""Sections that choose something by name: its kind in the registry, the key of the name, and the default, if any."""
INSIDE = {"schedule": "train.schedule", "local optimizer": "train.optimizer"}
"""Sections inside of `[train]`, which may also be given as a name alone."""


class RecipeError(ValueError):
    """A recipe that cannot be run; the message names the key and what is legal."""


class SectionModel(BaseModel):
    """A section: unknown keys are refused, and values are not converted to another type."""

    model_config = ConfigDict(**CONFIG, arbitrary_types_allowed=True, protected_namespaces=())


class Open(SectionModel):
    """A section that also takes keys which are not declared, and passes them on."""

    model_config = ConfigDict(extra="allow")


class OwnOptions(Open):
    """Something of your own: package.module:function, or package.module:Class. Its parameters are the options."""

    name: Annotated[str, Field(pattern=":")] = ""


def _names_a_directory(name: str) -> str:
    if Path(name).name != name:
        raise ValueError("must be usable as the name of a directory")
    return name


def _imports(name: str) -> str:
    if name:
        imported(name)
    return name


class RecipeModel(SectionModel):
    """A recipe of fedfactor: what `fedfactor run` trains, on which data, and how."""

    name: Annotated[str, AfterValidator(_names_a_directory)] = "run"
    """Name of the run directory, below runs/."""
    seed: int = Training.seed
    """Seed of everything random except the partition; short for train.seed."""
    data: Table = {}
    """The data set: one that is registered, or package.module:function of your own."""
    partition: Table = {}
    """How the data set is split over the clients."""
    objective: Table = {}
    """What the network learns: by default what the data ask for."""
    model: Table = {}
    """The network: one that is registered, or package.module:function of your own."""
    method: Table = {}
    """The federated method and its hyper-parameters: one that is registered, or package.module:Class of your own."""
    optimizer: Table = {}
    """The server's optimizer and its hyper-parameters; package.module:Class is one of your own."""
    codec: Table = {}
    """How tensors are encoded in messages; package.module:Class is a codec of your own."""
    tune: Table = {}
    """Fine-tuning: the model is frozen, and methods train the change of some of its layers."""
    train: Table = {}
    """Rounds, cohort and local training."""
    capacities: Table = {}
    """Which share of the model the clients can train."""
    fleet: Table = {}
    """The devices of the clients, on which a virtual clock times the rounds. Without it there is no clock."""
    rounds: Table = {}
    """When the server takes a step: after each cohort, or whenever enough replies have arrived."""
    aggregation: Table = {}
    """How the server puts replies together; rules other than the mean limit what hostile clients can do."""
    attack: Table = {}
    """What hostile clients do, to try rules of aggregation. Without it all clients are honest."""
    privacy: Table = {}
    """Differential privacy of whole clients: clipping, noise and the budget. Without it there is none."""
    evaluate: Table = {}
    """What is measured, and when."""
    run: Table = {}
    """What the run directory keeps."""
    paper: Table = {}
    """What the paper prints for this recipe, in any form; it is shown beside what was measured."""
    small: Table = {}
    """Sections that `--small` lays over the others, for a quick try."""
    sweep: Table = {}
    """Keys with lists of values, and [[sweep.cases]] with named overlays: one run per combination."""


class CapacitiesTable(SectionModel):
    """The section `[capacities]`."""

    levels: tuple[Level, ...] = (1.0,)
    """Capacities, as shares of the full model."""
    shares: tuple[Share, ...] = (1.0,)
    """The share of clients that have each level."""
    dynamic: bool = Capacities.dynamic
    """Whether each client draws its capacity anew in each round."""
    cover: bool = Capacities.cover
    """Whether capacities are drawn again until each level occurs among the clients of the round (needs `dynamic`)."""

    @model_validator(mode="after")
    def _check(self) -> CapacitiesTable:
        if len(self.levels) != len(self.shares) or len(set(self.levels)) != len(self.levels):
            raise ValueError("must have levels that differ, and one share per level")
        return self


class ObjectiveTable(SectionModel):
    """The section `[objective]`."""

    kind: Literal["", *get_args(Kind)] = ""  # type: ignore[valid-type]
    """What the targets are; by default what the data say, or custom if a loss is given."""
    loss: Annotated[str, AfterValidator(_imports)] = ""
    """The loss, as package.module:function: it gets the model's outputs and the batch, and returns a scalar tensor."""


class MetricsTable(SectionModel):
    """Keys of `[evaluate]` that choose metrics."""

    metrics: dict[str, str | Table] = {}
    """Metrics by name: `mae`, `mse`, package.module:function, or a table with the `name` of a class and its options."""
    best: str = ""
    """The metric that decides which model is best. Default: accuracy; the loss if the task has no classes."""
    higher_is_better: bool | None = None
    """Whether higher values of `best` are better. Metrics of torchmetrics, and built-in ones, know it themselves."""


def metrics_of(evaluate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a task that a section `[evaluate]` describes. Raise ValueError if they are wrong."""
    found: dict[str, Any] = {}
    for name, given in evaluate["metrics"].items():
        options = {"name": given} if isinstance(given, str) else dict(given)
        path = str(options.pop("name", ""))
        if ":" not in path and options:
            raise ValueError(f"{name}: only a metric that is named as package.module:name takes options, got {path!r}")
        found[name] = _metric(name, imported(path), options) if ":" in path else path
    return {"metrics": found, "best": evaluate["best"], "higher_is_better": evaluate.get("higher_is_better")}


def _metric(name: str, target: Any, options: Table) -> Any:
    """Return an object of a class, or a function with its options."""
    if not isinstance(target, type):
        return functools.partial(target, **options) if options else target
    try:
        return target(**options)
    except Exception as error:
        raise ValueError(f"{name}: {target.__name__} refuses its options: {error}") from error


class TuneTable(SectionModel):
    """The section `[tune]`."""

    targets: tuple[str, ...] = Tune.targets
    """Patterns of layers whose change is trained; default: queries and values of attention, or without attention all
    linear layers and convolutions. `["none"]`: only `train` is trained."""
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Tune.alpha
    """The change is multiplied by alpha / r, where r is its rank; the change of a method without ranks is not."""
    train: tuple[str, ...] = Tune.train
    """Patterns of tensors that are trained and sent whole, such as a new classifier."""
    adapter: str = Tune.adapter
    """Folder of an adapter in PEFT's format to start from; without `targets`, its layers are the targets."""


class RunTable(SectionModel):
    """The section `[run]`."""

    keep_rounds: tuple[Count, ...] = ()
    """Rounds whose checkpoint and private states are kept for later analysis."""


def _made(name: str, base: type[BaseModel], fields: Fields, summary: str | None = None) -> type[BaseModel]:
    """Make a model whose fields have their descriptions: pydantic need not search the source for them."""
    no_search = {"use_attribute_docstrings": False}
    return create_model(name, __base__=base, __doc__=summary, __cls_kwargs__=no_search, **fields)


def _fields(cls: Any) -> Fields:
    return {name: (info.annotation, info) for name, info in cls.__pydantic_fields__.items()}


TAKING_PART = ("rounds", "cohort", "quorum")
"""Fields of `Rounds` that are keys of `[train]`."""
MEASURING = {name.removeprefix("evaluate_"): name for name in _fields(Rounds) if name not in TAKING_PART}
"""Keys of `[evaluate]`, and the fields of `Rounds` that they set."""

_file = Field(None, description="A CSV file with one row per client, whose columns are keys of a device.")
_train = {**_fields(Training), **{name: _fields(Rounds)[name] for name in TAKING_PART}}
_evaluate = {key: _fields(Rounds)[name] for key, name in MEASURING.items()}
TABLES: dict[str, type[BaseModel]] = {
    "schedule": _made("ScheduleTable", SectionModel, _fields(Schedule)),
    "train": _made("TrainTable", SectionModel, _train),
    "capacities": CapacitiesTable,
    "objective": ObjectiveTable,
    "tune": TuneTable,
    "fleet": _made("FleetTable", SectionModel, {"file": (str | None, _file), **_fields(Fleet)}),
    "rounds": _made("RoundsTable", SectionModel, _fields(Buffering)),
    "aggregation": _made("AggregationTable", SectionModel, _fields(Aggregation)),
    "attack": _made("AttackTable", SectionModel, _fields(Attack)),
    "privacy": _made("PrivacyTable", SectionModel, _fields(Privacy)),
    "evaluate": _made("EvaluateTable", MetricsTable, _evaluate),
    "run": RunTable,
}
"""Sections whose keys are always the same; for `schedule`, see `INSIDE`."""


OPTIONAL = ("fleet", "rounds", "aggregation", "attack", "privacy")
"""Sections without which a run lacks what they describe; all others have defaults."""
OBJECTS = ("data", "partition", "objective", "model")
"""Sections that the recipe of a run from Python does not have: these are Python objects."""


def read_sections(tables: Table, where: str, leave_out: Collection[str] = ()) -> dict[str, BaseModel]:
    """Check all sections and return them by name; keys outside of sections have the name "", and see `INSIDE`.

    Raise RecipeError if there are mistakes. It names the recipe (`where`) and, for each mistake, the key and what is
    legal.
    """
    found, mistakes = {"": built(where, lambda: _read("", RecipeModel, tables))}, []
    wanted = [section for section in RecipeModel.model_fields if section in TABLES | CHOICES]
    absent = {*leave_out, *(section for section in OPTIONAL if section not in tables)}
    given = {section: tables.get(section, {}) for section in wanted if section not in absent}
    if "seed" in tables and "seed" in given["train"]:
        raise RecipeError(f"{where}: seed and train.seed are the same setting; give one of them")
    given["train"] = {**({"seed": tables["seed"]} if "seed" in tables else {}), **given["train"]}
    if path := given.get("fleet", {}).get("file"):
        read = built(f"{where}: fleet.file", lambda: read_devices(path))
        devices = {name: dataclasses.asdict(device) for name, device in read["devices"].items()}
        rest = {key: value for key, value in given["fleet"].items() if key != "file"}
        given["fleet"] = {**rest, "devices": devices, "of_clients": read["of_clients"]}
    for section, inside in INSIDE.items():
        chosen = given["train"].pop(inside.partition(".")[2], {})
        key = "kind" if section == "schedule" else "name"
        given[section] = {key: chosen} if isinstance(chosen, str) else chosen  # one that needs nothing else
    for section, table in given.items():
        try:
            found[section] = _read(section, _model(section, table), table)
        except ValueError as error:
            mistakes.append(str(error))
    if mistakes:
        raise RecipeError(f"{where}: {'; '.join(mistakes)}")
    return found


def _model(section: str, table: Table) -> type[BaseModel]:
    if section in TABLES:
        return TABLES[section]
    _, key, default = CHOICES[section]
    if not isinstance(table, dict):
        raise RecipeError(f"{INSIDE.get(section, section)} should be a table or a name, got {table!r}")
    name = table.get(key, default)
    if not isinstance(name, str):
        problem = "is missing and has no default" if name is None else f"should be a string, got {name!r}"
        raise RecipeError(f"{INSIDE.get(section, section)}.{key} {problem}")
    return built(INSIDE.get(section, section), lambda: options_of(section, name))


def _read(section: str, model: type[BaseModel], table: Any) -> BaseModel:
    try:
        # As JSON, for which strict mode takes lists as tuples: TOML has no tuples either.
        return model.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise RecipeError(sentence(error, table, model.model_fields, INSIDE.get(section, section))) from None


def built(where: str, build: Callable[[], Built]) -> Built:
    """Call `build`. Raise RecipeError, which begins with `where`, if it raises ValueError."""
    try:
        return build()
    except ValueError as error:
        raise RecipeError(f"{where}: {error}") from None


# The options of what sections choose by name.

WEIGHTS: Fields = {
    "pretrained": (
        str,
        Field(
            None,
            description="weights to start from: a safetensors, .pth or .bin file, a Hugging Face folder, or a model of "
            "its hub: huggingface:OWNER/NAME or huggingface:OWNER/NAME@REVISION",
        ),
    ),
    "pretrained_sha256": (str, Field(None, description="SHA-256 of the file with the weights; another one is refused")),
    "base_sha256": (str, Field(None, description="SHA-256 of the model's frozen tensors; a run refuses another base")),
}
"""Keys of `[model]` that every model has."""


def options_of(section: str, name: str) -> type[BaseModel]:
    """Return the model of a section that chooses `name`. Raise ValueError if there is nothing of that name."""
    if section == "data":
        entry: Entry = source_of(name)
    elif section == "local optimizer":
        entry = Entry("local optimizers", name, torch_class(name))
    elif ":" in name and section == "model":
        entry = Entry("models", name, imported(name))
    else:
        entry = get(CHOICES[section][0], name)
    return (_options.__wrapped__ if ":" in name else _options)(section, name, entry)


def builder_of(name: str) -> Callable[..., Any]:
    """Return the function or class that builds a model: a registered one, or `package.module:function`."""
    found: Callable[..., Any] = imported(name) if ":" in name else get("models", name).target
    return found


@functools.lru_cache(maxsize=256)  # a model takes 5 ms to build; functions of the user's own may not be hashable
def _options(section: str, name: str, entry: Any) -> type[BaseModel]:
    key, base = CHOICES[section][1], SectionModel
    if section in ("data", "model", "local optimizer"):
        fields = _parameters(entry.target)
        taken = inspect.signature(entry.target).parameters.values()
        base = Open if any(one.kind is one.VAR_KEYWORD for one in taken) else SectionModel
    else:
        fields = _hyperparameters(entry.target)
    if section == "data":
        entry.rest(name)
        fields = {option: fields[option] for option in entry.options}
        fields |= {option: (PICTURE_TYPES[option], default) for option, default in PICTURE.items()}
    elif section == "local optimizer":
        known, kept = LocalOptimizer(name), "Whether a client keeps the optimizer's state until its next round"
        fields = {
            option: (float | None if option in SHORT else fields[option][0], known.options.get(option))
            for option in known.parameters
            if option in fields
        }
        fields["keep_state"] = bool, Field(False, description=kept)
    elif section == "model":  # the data tell the number of classes, and a client's capacity the width of its network
        for option in {"classes", "width"} & {*fields}:
            if option == "classes" or fields[option][1].is_required():
                fields[option] = fields[option][0], Field(default=None)
        fields |= {key: field for key, field in WEIGHTS.items() if key not in fields}
    elif section == "partition":
        for option, (kind, field) in _parameters(federated).items():
            if option in SHARED:
                fields[option] = kind, Field(field.default, description=SHARED[option])
    fields = {key: (Literal[name], name)} | {option: field for option, field in fields.items() if option != key}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* shadows an attribute")  # an option may be called `json` or `copy`
        return _made(f"{section}-{name}", base, fields, entry.summary)


def _hyperparameters(cls: Any) -> Fields:
    """Return the fields of a dataclass."""
    types, found = get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        stated = {"default": field.default, "default_factory": field.default_factory}
        default: Any = {key: value for key, value in stated.items() if value is not MISSING}
        found[field.name] = types[field.name], Field(**default, description=field.metadata.get("help"))
    return found


def _parameters(function: Callable[..., Any]) -> Fields:
    """Return the parameters of a function, with the types and the simple defaults that it declares.

    Other defaults are left to the function: a recipe cannot write them.
    """
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, TypeError, SyntaxError):  # annotations with names that exist only for type checkers
        signature = inspect.signature(function)
    found: Fields = {}
    for name, one in signature.parameters.items():
        if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) or name.startswith("_"):
            continue
        simple = isinstance(one.default, (bool, int, float, str))
        unsaid = one.annotation is one.empty or isinstance(one.annotation, str)
        expected = (type(one.default) if simple else Any) if unsaid else one.annotation
        found[name] = expected, Field(... if one.default is one.empty else one.default if simple else None)
    return found


# For editors.


class _Schema(GenerateJsonSchema):
    """A JSON Schema without titles that only repeat names; types that JSON does not know may be anything."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        return {}


def schema() -> Table:
    """Return the JSON Schema of recipes, with all registered names, those of installed packages included."""
    fields: Fields = {section: TABLES[section] for section in RecipeModel.model_fields if section in TABLES}
    for section, (kind, _, _) in CHOICES.items():
        known = [
            name for name, entry in (entries(kind) if kind else NAMES).items() if not getattr(entry, "prefix", False)
        ]
        options = [*(options_of(section, name) for name in known), *([OwnOptions] if section != "partition" else [])]
        fields[section] = functools.reduce(operator.or_, options)
    table, either = TABLES["train"], fields.pop("local optimizer") | str
    chosen = (
        either,
        Field(description=table.model_fields["optimizer"].description, default=CHOICES["local optimizer"][2]),
    )
    fields["train"] = _made("TrainTable", table, {"optimizer": chosen})
    fields = {section: (kind, RecipeModel.model_fields[section]) for section, kind in fields.items()}
    found = _made("Recipe", RecipeModel, fields, RecipeModel.__doc__)
    text = json.dumps(found.model_json_schema(schema_generator=_Schema))
    made: Table = json.loads(text, parse_constant=lambda _: "inf")  # JSON has no infinity; TOML writes it like this
    made["properties"]["small"]["$ref"] = "#"
    made["properties"]["sweep"]["properties"] = {"cases": {"type": "array", "items": {"$ref": "#"}}}
    return made
