"""Which methods fit which devices, at what rank or width, and what they cost there: `fedfactor plan`.

Nothing is estimated by a formula a method. The network that a client would train is built through the method's own
hooks (without numbers), its operations and what training keeps are counted, and the bytes are the length of messages
that are really encoded. Whether a model will be accurate is not asked here: `fedfactor compare` finds out.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tomli_w
import torch
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import nn

from fedfactor import cost, models, recipe
from fedfactor.client import code_down, code_up
from fedfactor.methods.base import Method
from fedfactor.nn.state import tensors_of
from fedfactor.plan import Tensors
from fedfactor.registry import create, entries
from fedfactor.rng import torch_rng
from fedfactor.run import Absent, model_factory
from fedfactor.task import Task, like
from fedfactor.wire import Message, encode

CAPACITIES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625)
"""Shares of the full model to try, where a method has networks of several sizes."""
TRAINING = 3
"""Operations of a training step as a multiple of its forward pass: the backward pass has two products for each."""
CLIENTS, COHORT, EXAMPLES = 100, 0.1, 500
"""What a recipe that is written gets, and how much a client has to train on, where nobody says otherwise."""

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MACS = {"kMAC": 1e3, "MMAC": 1e6, "GMAC": 1e9, "TMAC": 1e12}
LINKS = {"kbps": 1e-3, "Mbps": 1.0, "Gbps": 1e3}
TIMES = {"s": 1.0, "min": 60.0}


class PlanError(ValueError):
    """A plan that cannot be made as asked."""


@dataclass(frozen=True)
class Device:
    """What a kind of device can take in a round; `None` is no limit."""

    name: str
    up: float | None = None
    """Bytes."""
    down: float | None = None
    memory: float | None = None
    """Bytes: weights, gradients, momentum, and what a batch leaves for the backward pass."""
    macs: float | None = None
    """Multiply-accumulates of an example's forward pass."""
    seconds: float | None = None
    joules: float | None = None
    speed: float | None = None
    """Multiply-accumulates a second."""
    mbps: float | None = None
    share: float | None = None
    """Share of the clients that are such devices."""

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read `phone: 2 MB up, 60 MMAC, 40 MB`."""
        name, colon, rest = text.partition(":")
        if not colon or not name.strip() or not rest.strip():
            raise PlanError(f"a device is a name and its limits, such as {EXAMPLE!r}, got {text!r}")
        given: dict[str, float] = {}
        for words in rest.split(","):
            key, value = _limit(words.strip(), text)
            if key in given:
                raise PlanError(f"device {text!r} says twice what its {key} is")
            given[key] = value
        return cls(name.strip(), **given)


EXAMPLE = "phone: 2 MB up, 60 MMAC, 40 MB"
GRAMMAR = (
    "bytes (2 MB up, 4 MB down, 40 MB memory), operations (60 MMAC an example's forward pass, 5 GMAC/s), time (30 s), "
    "energy (5 J), link (2 Mbps) or share of the clients (20 %)"
)


def _limit(words: str, device: str) -> tuple[str, float]:
    """Read one limit: which it is, and its value in bytes, operations, seconds, joules, Mbps or as a share."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([A-Za-z%]+(?:/s)?)(?:\s+(up|down|memory))?", words)
    if found:
        value, unit, word = float(found[1]), found[2], found[3]
        if unit in UNITS:
            return word or "memory", value * UNITS[unit]
        table: dict[str, tuple[str, float]] = {
            **{name: ("macs", scale) for name, scale in MACS.items()},
            **{f"{name}/s": ("speed", scale) for name, scale in MACS.items()},
            **{name: ("mbps", scale) for name, scale in LINKS.items()},
            **{name: ("seconds", scale) for name, scale in TIMES.items()},
            "J": ("joules", 1.0),
            "%": ("share", 0.01),
        }
        if unit in table and not word:
            return table[unit][0], value * table[unit][1]
    raise PlanError(f"device {device!r}: {words!r} is no limit; legal are {GRAMMAR}")


def link(text: str) -> float:
    """Read the speed of a link, such as 2Mbps, in Mbps."""
    key, value = _limit(text.strip(), f"--link {text}")
    if key != "mbps" or not value:
        raise PlanError(f"a link has a speed such as 2Mbps, got {text!r}")
    return value


@dataclass(frozen=True)
class Size:
    """What a client's network is and what it sends; the same on every device."""

    parameters: int
    macs: float
    """Of an example's forward pass in training, composing included."""
    activations: int
    """Bytes that the forward pass of a batch leaves for the backward pass."""
    memory: int
    """Those, weights, gradients, momentum and buffers."""
    down: int
    """Bytes of a round's message to the client."""
    up: int
    """Bytes of its reply."""


WORDS = {
    "up": "up",
    "down": "down",
    "memory": "of memory",
    "macs": "an example",
    "seconds": "a round",
    "joules": "a round",
}
"""What a device may limit, and how a sentence names it."""


@dataclass(frozen=True)
class Row:
    """A method on a device."""

    method: str
    device: str
    capacity: float
    settings: dict[str, Any]
    """Those that are not the method's defaults."""
    size: Size
    seconds: float | None
    """Of a round, as far as they are known: on the link, and computing."""
    joules: float | None
    bytes_ratio: float
    """Bytes of dense FedAvg over these."""
    macs_ratio: float
    """Operations as a share of dense FedAvg's."""
    stopped_by: tuple[str, ...]
    """Limits that the next larger size would break; empty where there is none."""

    def as_dict(self) -> dict[str, Any]:
        """The row as plain data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Fit:
    """A method that fits every device."""

    method: Method
    rows: tuple[Row, ...]
    """One a device, in their order."""
    personal: bool
    """Whether there is no model without a client's part."""
    share: float
    """Of dense FedAvg's operations, over all clients; at most 1 each."""


@dataclass(frozen=True)
class Request:
    """What is asked: a model, its input, the devices, and what a round is."""

    tables: recipe.Table
    """A recipe; its data and method are not looked at."""
    devices: tuple[Device, ...]
    shape: tuple[int, ...]
    tokens: int = 0
    """Number of legal ids, where inputs are token ids."""
    classes: int = 10
    mbps: float | None = None
    examples: int = EXAMPLES
    joules_per_mb: float | None = None
    joules_per_gmac: float | None = None
    capacities: tuple[float, ...] = CAPACITIES
    personal: bool = False
    """Whether a model of each client's own is wanted."""
    methods: tuple[str, ...] = ()
    """Empty: all."""
    data: str | None = None
    """Name of the data set, for a recipe."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlanError(f"there is no device to plan for; give one, such as {EXAMPLE!r}")
        known = [device.name for device in self.devices]
        if len(set(known)) != len(known):
            raise PlanError(f"devices need names of their own, got {', '.join(known)}")
        _ = self.shares  # says what is wrong with them
        if not self.shape or min(self.shape) < 1:
            raise PlanError(f"an input has a shape such as 3x32x32, got {self.shape}")
        if not self.capacities or not all(0 < level <= 1 for level in self.capacities):
            raise PlanError(f"capacities lie in (0, 1], got {list(self.capacities)}")
        for device in self.devices:
            if device.seconds is not None and (device.mbps or self.mbps) is None:
                raise PlanError(f"{device.name} limits the seconds of a round, which need a link: --link 2Mbps")
            if device.joules is not None and (self.joules_per_mb is None or self.joules_per_gmac is None):
                raise PlanError(f"{device.name} limits energy: say what a MB and a GMAC cost (--joules-per-mb, ...)")

    @cached_property
    def resolved(self) -> recipe.Recipe:
        """Settings of the training, of the codec and of the model, checked."""
        return recipe.resolve(self.tables, "plan")

    @property
    def shares(self) -> list[float]:
        """Share of the clients by device; what is not given is divided evenly."""
        given = [device.share for device in self.devices]
        rest, open_ = 1.0 - sum(share or 0.0 for share in given), given.count(None)
        if rest < -1e-9 or (not open_ and abs(rest) > 1e-9):
            raise PlanError(f"the devices' shares of the clients add up to {100 * (1 - rest):g} %, not 100 %")
        if open_ and rest < 1e-9:
            raise PlanError("the devices' shares leave no clients for those without a share")
        return [rest / open_ if share is None else share for share in given]


# Measuring.


class Gauge:
    """Measures the networks that clients of a method would train, each once."""

    def __init__(self, request: Request) -> None:
        known = request.resolved
        self.training, self.codec = known.training, known.codec
        size = (self.training.batch, *request.shape)
        home = torch.empty(0, dtype=self.training.torch_dtype)
        self.batch = torch.ones(size, dtype=torch.int64) if request.tokens else like(torch.ones(size), home)
        table = known.tables["model"]
        self.task = Task(model_factory(table, request.classes), Absent(1, self.batch[0]))
        self._sizes: dict[tuple[str, float], Size] = {}
        self._costs: dict[tuple[str, float], tuple[nn.Module, cost.Cost]] = {}

    def build(self, width: float = 1.0) -> nn.Module:
        """Build the model without numbers."""
        try:
            with torch.device("meta"):
                return self.task.build(width)
        except (NotImplementedError, RuntimeError):  # a model that computes with its first values
            return self.task.build(width).to("meta")

    def ready(self, method: Method, levels: Sequence[float]) -> Method:
        """Return a method as it is for these capacities and inputs, in its first round; it may refuse."""
        fitted = method.fitted(sorted(levels, reverse=True)).sized(self.batch[0])
        fitted.phases(self.training.epochs)
        return fitted.at(0)

    def size(self, method: Method, capacity: float) -> Size:
        """Measure the network of a capacity, and its messages."""
        key = repr(method), capacity
        if key not in self._sizes:
            network, counted = self.measured(method, capacity)
            method.check(self.task, network)
            macs = sum(
                times * self.measured(method, level)[1].macs / len(self.batch)
                for level, times in method.passes(capacity).items()
            )
            held = sum(t.nbytes for t in [*network.parameters(), *network.buffers()])
            trained = sum(p.nbytes for p in network.parameters() if p.requires_grad)
            memory = held + (2 if self.training.momentum else 1) * trained + counted.activation_bytes
            down, up = self._messages(method, network, capacity)
            self._sizes[key] = Size(counted.parameters, macs, counted.activation_bytes, memory, down, up)
        return self._sizes[key]

    def measured(self, method: Method, capacity: float) -> tuple[nn.Module, cost.Cost]:
        """Return the network of a capacity, and what a training batch costs it."""
        key = repr(method), capacity
        if key not in self._costs:
            network = method.network(self.build, capacity).to(self.training.torch_dtype).train()
            self._costs[key] = network, cost.measure(network, self.batch)
        return self._costs[key]

    def _messages(self, method: Method, network: nn.Module, capacity: float) -> tuple[int, int]:
        """Encode a job and its reply as a round does, of zeros, and return their lengths."""
        shapes, shared = tensors_of(network), method.shared_names(network)
        tensors: Tensors = {name: torch.zeros(shapes[name].shape, dtype=shapes[name].dtype) for name in shared}
        trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
        job = {"client": 0, "round": 0, "capacity": capacity, "lr": self.training.lr, "test": False}
        coded_down = code_down(self.codec, trained, tensors)
        rng = torch_rng(0, "plan")
        coded_up, _ = code_up(self.codec, trained, tensors, tensors, {}, rng)
        reply = {"client": 0, "round": 0, "capacity": capacity, "samples": 1000, "loss": 1 / 3, "steps": 10}
        return _length("train", job, coded_down), _length("trained", reply, coded_up)


def _length(kind: str, fields: dict[str, Any], tensors: Tensors) -> int:
    return len(encode(Message(kind, fields, {f"model/{name}": tensor for name, tensor in tensors.items()})))


# Fitting.


@dataclass
class Plan:
    """The answer: what fits, what does not and why, and the choice."""

    request: Request
    gauge: Gauge
    dense: Size
    """Of FedAvg with the full model."""
    fits: list[Fit] = field(default_factory=list)
    """Those that fit every device; the choice first."""
    misfits: dict[str, str] = field(default_factory=dict)
    """Why the other methods do not."""

    @property
    def choice(self) -> Fit | None:
        """The method to take, of the kind that was asked for."""
        return next((fit for fit in self.fits if fit.personal == self.request.personal), None)


def plan(request: Request) -> Plan:
    """Find the largest network of every method that fits every device."""
    gauge, known = Gauge(request), entries("methods")
    wanted = request.methods or tuple(known)
    for name in wanted:
        create("methods", name)  # says what there is
    fedavg = gauge.ready(create("methods", "fedavg"), [1.0])
    try:
        dense = gauge.size(fedavg, 1.0)
    except Exception as error:
        shape = " x ".join(map(str, request.shape))
        raise PlanError(f"the model cannot take inputs of {shape}: {error}") from error
    found = Plan(request, gauge, dense)
    for name in wanted:
        try:
            fit = _fit(name, request, gauge, dense)
        except ValueError as error:  # the method's own word on why it makes no sense here
            found.misfits[name] = str(error)
            continue
        if isinstance(fit, Fit):
            found.fits.append(fit)
        else:
            found.misfits[name] = fit
    found.fits.sort(key=lambda fit: _merit(fit, request), reverse=True)
    return found


def _merit(fit: Fit, request: Request) -> tuple[Any, ...]:
    """Order what fits: the kind that is wanted, most of the dense model's operations, then the fewest bytes.

    Devices that can afford it should compute the full model; where everybody can, plain FedAvg is enough.
    """
    sent = sum(share * (row.size.up + row.size.down) for share, row in zip(request.shares, fit.rows, strict=True))
    return fit.personal == request.personal, round(fit.share, 3), fit.method.name == "fedavg", -sent


def _fit(name: str, request: Request, gauge: Gauge, dense: Size) -> Fit | str:
    """Return a method's largest networks that fit, or why there are none."""
    method: Method = create("methods", name)
    broken: tuple[str, ...] = ()
    last = ""
    for settings in _settings(name):
        method = create("methods", name, **settings)
        chosen, stopped, last = _sizes(method, request, gauge)
        if chosen:
            rows = tuple(
                _row(name, settings, device, level, size, request, dense, stop or broken)
                for device, (level, size), stop in zip(request.devices, chosen, stopped, strict=True)
            )
            shares = (share * min(1.0, row.macs_ratio) for share, row in zip(request.shares, rows, strict=True))
            ready = gauge.ready(method, [level for level, _ in chosen])
            network, _ = gauge.measured(ready, chosen[0][0])
            return Fit(method, rows, not ready.has_global_model(network), sum(shares))
        broken = tuple(dict.fromkeys(word for words in stopped for word in words))
    return last


def _settings(name: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of a method to try, the largest networks first; fields say which of theirs (`tries`)."""
    fields = dataclasses.fields(entries("methods")[name].cls)
    tried = {f.name: f.metadata["tries"] for f in fields if "tries" in f.metadata}
    for values in itertools.product(*tried.values()):
        yield dict(zip(tried, values, strict=True))


def _sizes(
    method: Method, request: Request, gauge: Gauge
) -> tuple[list[tuple[float, Size]], list[tuple[str, ...]], str]:
    """Step every device down until all fit; networks of one capacity may depend on which others there are.

    Returns capacity and size by device (nothing: it does not fit), the limits that stopped the next larger one, and
    a sentence on what does not fit.
    """
    ladder = sorted(request.capacities, reverse=True) if method.adapts else [1.0]
    steps = [0] * len(request.devices)
    stopped: list[tuple[str, ...]] = [() for _ in request.devices]
    refused: ValueError | None = None
    while True:
        if max(steps) >= len(ladder):  # none of the sizes that are left can be built
            assert refused is not None
            raise refused
        levels = [ladder[step] for step in steps]
        try:
            ready = gauge.ready(method, sorted(set(levels), reverse=True))
            sizes = [gauge.size(ready, level) for level in levels]
        except ValueError as error:
            # A method may have no network of a size: all its layers would be larger as factors.
            refused = refused or error
            place = ladder.index(max(levels, key=lambda level: (level < 1.0, level)))
            del ladder[place]
            steps = [step - (step > place) for step in steps]
            continue
        over = [_over(device, size, request) for device, size in zip(request.devices, sizes, strict=True)]
        if not any(over):
            return list(zip(levels, sizes, strict=True)), stopped, ""
        stopped = [tuple(found) or before for found, before in zip(over, stopped, strict=True)]
        for device, step, found in zip(request.devices, steps, over, strict=True):
            if found and step + 1 == len(ladder):
                words = [
                    f"{_quantity(key, value)} {WORDS[key]}, {device.name} has {_quantity(key, getattr(device, key))}"
                    for key, value in found.items()
                ]
                return [], stopped, f"needs {'; '.join(words)}"
        steps = [step + bool(found) for step, found in zip(steps, over, strict=True)]


def _over(device: Device, size: Size, request: Request) -> dict[str, float]:
    """Return the limits of a device that a network breaks, and what it needs."""
    found = _needs(device, size, request)
    limits = {key: getattr(device, key) for key in WORDS}
    return {
        key: value
        for key, value in found.items()
        if value is not None and limits[key] is not None and value > limits[key]
    }


def _needs(device: Device, size: Size, request: Request) -> dict[str, float | None]:
    work = TRAINING * size.macs * request.examples * request.resolved.training.epochs
    mbps = device.mbps or request.mbps
    seconds = cost.link_seconds(size.down + size.up, mbps, transfers=1) if mbps else None
    if device.speed:
        seconds = (seconds or 0.0) + work / device.speed
    joules = None
    if request.joules_per_mb is not None or request.joules_per_gmac is not None:
        joules = (request.joules_per_mb or 0.0) * (size.down + size.up) / 1e6
        joules += (request.joules_per_gmac or 0.0) * work / 1e9
    return {
        "up": size.up, "down": size.down, "memory": size.memory, "macs": size.macs, "seconds": seconds,
        "joules": joules,
    }  # fmt: skip


def _row(
    name: str, settings: dict[str, Any], device: Device, level: float, size: Size, request: Request, dense: Size,
    stopped: tuple[str, ...],
) -> Row:  # fmt: skip
    needs = _needs(device, size, request)
    ratio = (dense.down + dense.up) / (size.down + size.up)
    return Row(
        name, device.name, level, settings, size, needs["seconds"], needs["joules"], ratio, size.macs / dense.macs,
        stopped,
    )  # fmt: skip


def _quantity(key: str, value: float) -> str:
    """Write a quantity with its unit."""
    if key in ("up", "down", "memory"):
        return f"{value / 1e6:.3g} MB" if value >= 1e6 else f"{value / 1e3:.3g} kB"
    if key == "macs":
        return f"{value / 1e6:.4g} MMAC"
    return f"{value:.3g} {'s' if key == 'seconds' else 'J'}"


# Telling.


def sentence(found: Plan) -> str:
    """Explain the choice in one sentence."""
    request, fit = found.request, found.choice
    kind = "personal models" if request.personal else "a model of the server's own"
    if fit is None:
        return (
            f"No method that gives {kind} fits every device: raise a limit, try a smaller batch (--set train.batch=8) "
            "or smaller capacities (--capacities), or take a smaller model."
        )
    sizes = ", ".join(_what(fit, row) for row in fit.rows)
    rivals = sum(other.personal == fit.personal for other in found.fits) - 1
    if fit.method.name == "fedavg":
        return "Take fedavg: every device can carry the whole dense model, so nothing has to be made smaller."
    among = f"of the {rivals + 1} methods that give {kind} and fit every device" if rivals else "it alone fits"
    stopped = dict.fromkeys(word for row in fit.rows for word in row.stopped_by)
    bound = f"; what keeps it from more is {' and '.join(NAMES[word] for word in stopped)}" if stopped else ""
    saved = min(row.bytes_ratio for row in fit.rows), max(row.bytes_ratio for row in fit.rows)
    times = f"{saved[0]:.3g}" if f"{saved[0]:.3g}" == f"{saved[1]:.3g}" else f"{saved[0]:.3g} to {saved[1]:.3g}"
    return (
        f"Take {fit.method.name} ({sizes}): {among}, its clients compute the largest share of the dense model "
        f"({100 * fit.share:.3g} % on average), at {times} times fewer bytes than dense FedAvg{bound}."
    )


NAMES = {
    "up": "the upload", "down": "the download", "memory": "memory", "macs": "computing", "seconds": "time",
    "joules": "energy",
}  # fmt: skip


def _what(fit: Fit, row: Row) -> str:
    return f"{row.device} {row.capacity:g}" if fit.method.adapts else _setting(row) or "the same everywhere"


def _setting(row: Row) -> str:
    return ", ".join(f"{key} = {value:g}" for key, value in row.settings.items())


def render(found: Plan, rounds: int | None = None) -> RenderableType:
    """Lay a plan out: a table a device, what does not fit, the choice."""
    request, parts = found.request, list[RenderableType]()
    training = request.resolved.training
    dense = found.dense
    parts.append(
        Text(
            f"{request.tables['model']['name']}, inputs of {' x '.join(map(str, request.shape))}, dense: "
            f"{dense.parameters:,} parameters, {_quantity('macs', dense.macs)} an example, "
            f"{_quantity('memory', dense.memory)} to train a batch of {training.batch} "
            f"({_quantity('memory', dense.activations)} of them activations), {_quantity('up', dense.up)} up and "
            f"{_quantity('down', dense.down)} down a round."
        )
    )
    for place, device in enumerate(request.devices):
        limits = [_quantity(key, getattr(device, key)) + f" {WORDS[key]}" for key in WORDS if getattr(device, key)]
        table = Table(title=f"{device.name}: {', '.join(limits) or 'no limit'}", title_justify="left")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in ("method", "size") else "right")
        for fit in found.fits:
            table.add_row(*_cells(fit, fit.rows[place], rounds))
        parts.append(table)
    if found.misfits:
        table = Table("does not fit", "why", show_header=True)
        for name, reason in sorted(found.misfits.items()):
            table.add_row(name, escape(reason))
        parts.append(table)
    notes = [f"Memory: weights, gradients{', momentum' if training.momentum else ''} and activations of a batch. "]
    if any(row.seconds is None for fit in found.fits for row in fit.rows):
        notes.append("Seconds need a link (--link 2Mbps). ")
    elif not all(device.speed for device in request.devices):
        notes.append("Seconds are those of the link; with a device's speed (5 GMAC/s) those of computing are added. ")
    if request.joules_per_mb is None and request.joules_per_gmac is None:
        notes.append("Energy needs what a MB and a GMAC cost on your devices (--joules-per-mb, --joules-per-gmac). ")
    notes.append("What fits is not what learns best: fedfactor compare finds out.")
    parts += [Text("".join(notes), style="dim"), Text(sentence(found), style="bold")]
    return Group(*parts)


COLUMNS = (
    "method", "size", "parameters", "MMAC", "MB to train (activations)", "up MB", "down MB", "s a round", "J a round",
    "fewer bytes",
    "of dense MACs", "stopped by",
)  # fmt: skip


def _cells(fit: Fit, row: Row, rounds: int | None) -> list[str]:
    size = row.size
    what = f"capacity {row.capacity:g}" if fit.method.adapts else _setting(row)
    total = "" if rounds is None else f" ({rounds * (size.up + size.down) / 1e9:.3g} GB in {rounds} rounds)"
    return [
        fit.method.name + (" (personal)" if fit.personal else ""),
        what,
        f"{size.parameters:,}",
        f"{size.macs / 1e6:.4g}",
        f"{size.memory / 1e6:.3g} ({size.activations / 1e6:.3g})",
        f"{size.up / 1e6:.3g}",
        f"{size.down / 1e6:.3g}",
        "-" if row.seconds is None else f"{row.seconds:.3g}",
        "-" if row.joules is None else f"{row.joules:.3g}",
        f"{row.bytes_ratio:.3g}x{total}",
        f"{100 * row.macs_ratio:.3g} %",
        ", ".join(row.stopped_by),
    ]


def as_dict(found: Plan, rounds: int | None = None) -> dict[str, Any]:
    """Return a plan as plain data."""
    fit = found.choice
    rows = [{**row.as_dict(), "personal": one.personal} for one in found.fits for row in one.rows]
    if rounds is not None:
        for row in rows:
            row["total_bytes"] = rounds * (row["size"]["up"] + row["size"]["down"])
    return {
        "model": found.request.tables["model"],
        "dense": dataclasses.asdict(found.dense),
        "devices": [dataclasses.asdict(device) for device in found.request.devices],
        "fits": rows,
        "misfits": found.misfits,
        "choice": None if fit is None else fit.method.name,
        "why": sentence(found),
    }


# Writing it down.


def to_recipe(found: Plan, name: str) -> str:
    """Write the choice as a recipe."""
    fit, request = found.choice, found.request
    if fit is None:
        raise PlanError(f"there is nothing to write: {sentence(found)}")
    if request.data is None:
        raise PlanError("a recipe names its data set: --data cifar10, or another that `fedfactor run` can load")
    tables = {key: value for key, value in request.tables.items() if key != "name"}
    shares: dict[float, float] = {}
    for share, row in zip(request.shares, fit.rows, strict=True):
        shares[row.capacity] = shares.get(row.capacity, 0.0) + share
    levels = sorted(shares, reverse=True)
    tables["method"] = {"name": fit.method.name, **fit.rows[0].settings}
    tables["capacities"] = {"levels": levels, "shares": [round(shares[level], 6) for level in levels]}
    tables = {"name": name, **tables}
    recipe.resolve(tables, "the plan's recipe")  # what is written must be what `run` accepts
    lines = [f"# {sentence(found)}", *(f"# {_described(device)}" for device in request.devices)]
    return "\n".join(lines) + "\n" + tomli_w.dumps(tables)


def _described(device: Device) -> str:
    limits = [
        f"{_quantity(key, getattr(device, key))} {WORDS[key]}" for key in WORDS if getattr(device, key) is not None
    ]
    return f"{device.name}: {', '.join(limits) or 'no limit'}"


KNOWN_DATA = {
    ("1x8x8", 10): "digits", ("1x28x28", 10): "mnist", ("1x28x28", 62): "femnist", ("3x32x32", 10): "cifar10",
    ("3x32x32", 100): "cifar100",
}  # fmt: skip
"""Data sets of inputs and classes like these."""


def request_of(
    model: str,
    shape: str | None,
    classes: int | None,
    devices: Sequence[str],
    *,
    data: str | None = None,
    tokens: int = 0,
    rounds: int | None = None,
    settings: Sequence[str] = (),
    **options: Any,
) -> Request:
    """Make a request of what the command line says; what a registered model knows of itself need not be said."""
    known = models.info(model) if ":" not in model else None
    if shape is None and (known is None or known.input_shape is None):
        raise PlanError("say what an input looks like: --input 3x32x32, or --input 64 --tokens 10000 for texts")
    sizes = _sides(shape) if shape is not None else tuple(known.input_shape or ()) if known else ()
    if known is not None and not known.input_dtype.is_floating_point:
        tokens = tokens or known.tokens
    wanted = data or KNOWN_DATA.get(("x".join(map(str, sizes)), classes or 10))
    tables: recipe.Table = {
        "name": "plan",
        "data": {"name": wanted or "digits"},  # where nobody knows, any: a plan does not look at it
        "partition": {"kind": "iid", "clients": CLIENTS},
        "model": {"name": model},
        "train": {"cohort": COHORT} | ({} if rounds is None else {"rounds": rounds}),
    }
    tables = recipe.override(tables, list(settings))
    parsed = tuple(Device.parse(text) for text in devices)
    return Request(tables, parsed, sizes, tokens, classes or 10, data=wanted, **options)


def _sides(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text):
        raise PlanError(f"an input has a shape such as 3x32x32, got {text!r}")
    return tuple(int(side) for side in text.split("x"))
