"""Take a model out of a run: plain torch in one file, checked, with a card that says what it is.

The server's model, at a capacity, or a client's own is composed to ordinary layers and compared with the network as it
was trained; then it is written, read back from the file and compared again. Only a file that answers alike stays.

| file | what is in it | who reads it |
|---|---|---|
| `.safetensors` | the tensors of the plain network | torch and the code that builds the network |
| `.pt2` | tensors and graph (`torch.export`) | torch alone |
| `.onnx` | tensors and graph | any ONNX runtime |
"""

from __future__ import annotations

import ast
import copy
import importlib
import importlib.util
import inspect
import logging
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import fedfactor
from fedfactor.client import kept_of
from fedfactor.federation import Federation, Server
from fedfactor.methods.base import Participant
from fedfactor.nn.norms import batch_norms, watched_norms, with_statistics
from fedfactor.nn.state import fill, tensors_of
from fedfactor.plan import Tensors
from fedfactor.recipe import builder_of
from fedfactor.registry import entries
from fedfactor.rng import derive, numpy_rng, seeded
from fedfactor.run import Run, model_options, task_of
from fedfactor.simulation import Result
from fedfactor.store import HeldTensors
from fedfactor.task import Examples, Task, like
from fedfactor.wire import Message, encode, read_weights

CHECKED = 64
"""Examples of the batch on which models are compared."""
APART = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference of two outputs, as a share of the largest output: sums in another order differ by less."""
FROZEN_ON = 10_000
"""Most training examples on which norm statistics are estimated, in batches of `FROZEN_BATCH`."""
FROZEN_BATCH = 500
"""As many as scores are measured on at once."""
HEAD = "# Plain torch: the network of the weights beside this file."


class ExportError(RuntimeError):
    """A model that cannot be taken out of a run as asked."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    card: Path
    architecture: Path | None
    """The code of the network, where the file has none and the user's own package has none either."""
    snippet: str
    """Python that loads the file without this library."""
    difference: float
    """Largest difference to the network as trained, as a share of the largest output."""
    accuracy: float | None
    """Of the model as written, on the test data; `None` where there is none."""


@dataclass(frozen=True)
class Taken:
    """A plain model and what is known of it."""

    model: nn.Module
    run: Run
    result: Result
    capacity: float
    client: int | None
    batch: Tensor
    """Inputs to compare on."""
    batch_of: str
    """What they are, in words."""
    norms: str
    """What the norm statistics are, in words; empty without batch norms."""
    difference: float
    scores: dict[str, float]
    """Measured on `tested`."""
    tested: str


def export(
    directory: Path | str,
    path: Path | str,
    *,
    capacity: float | None = None,
    client: int | None = None,
    round: int | None = None,
    data_dir: Path | str | None = None,
    with_data: bool = True,
) -> Exported:
    """Write a run's model to `path`, whose ending says how, and a card beside it.

    The server's model at its largest capacity, or at `capacity`; or a client's own; of the last round or a kept one.
    Without the data (`with_data=False`) models are compared on random inputs, and no accuracy is measured.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ExportError(f"the name of the file says how to write it: {', '.join(FORMATS)}; got {path}")
    if not path.parent.is_dir():
        raise ExportError(f"there is no directory {path.parent} to write {path.name} to")
    form = FORMATS[path.suffix]()
    form.check()
    taken = take(Run(directory, round), capacity, client, data_dir, with_data)
    code = _architecture(taken)
    unfinished = path.with_name(f"{path.stem}.unfinished{path.suffix}")
    beside = path.with_name(f"{_word(path.stem)}_architecture.py") if form.needs_code and code.text else None
    try:
        form.write(taken, unfinished)
        apart = _apart(form.answers(unfinished, taken, code), _answers(taken.model, taken.batch))
        if apart > _limit(taken.model):
            raise ExportError(
                f"the file answers otherwise than the model ({apart:.1e} of its largest output); not written"
            )
        if beside is not None:
            _write_code(beside, code.text or "")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    snippet = form.snippet(path, taken, code)
    card = path.with_suffix(".card.md")
    card.write_text(_card(taken, path, snippet, form, beside, apart), encoding="utf-8")
    return Exported(path, card, beside, snippet, taken.difference, taken.scores.get("accuracy"))


# Out of the run.


def take(run: Run, capacity: float | None, client: int | None, data_dir: Path | str | None, with_data: bool) -> Taken:
    """Compose a run's model and compare it with the network as trained."""
    if not run.recipe.method.plain:
        raise ExportError(
            f"{run.recipe.method.name}'s weights depend on the batch, so there is no plain model to write; "
            "fedfactor.load(DIR).model(client=...) opens it"
        )
    facts = run.task
    if client is not None and not 0 <= client < facts["clients"]:
        raise ExportError(f"there is no client {client}: the run has {facts['clients']}, counted from 0")
    result = run.rebuilt(task_of(run.recipe, data_dir)[0] if with_data else run.task_without_data())
    federation, server = result.federation, result.server
    level = _level(federation, server, capacity, client)
    who = Participant(-1 if client is None else client, level, server.round)
    batch, batch_of = _batch(federation.setup.task, client, with_data)
    _check_norms(run, federation, server, level, with_data)
    plain = result.model_at(level) if client is None else result.client_model(client)
    plain = copy.deepcopy(plain).eval()  # the federation fills its networks again and again
    trained = _as_trained(federation, server, who).eval()
    batch = like(batch, next(iter(plain.parameters()), torch.zeros(())))
    apart = _apart(_answers(plain, batch), _answers(trained, batch))
    if apart > _limit(plain):
        raise ExportError(
            f"the composed model differs from the trained one by {apart:.1e} of its largest output: nothing was written"
        )
    if next((p.dtype for p in plain.parameters()), None) == torch.bfloat16:
        plain, batch = plain.float(), batch.float()  # exact, and read everywhere
    norms = _frozen(plain, federation, client, calibrated=run.recipe.method.calibrates)
    scores, tested = _scores(federation.setup.task, plain, client) if with_data else ({}, "")
    return Taken(plain, run, result, level, client, batch, batch_of, norms, apart, scores, tested)


def _level(federation: Federation, server: Server, capacity: float | None, client: int | None) -> float:
    """Return the capacity of the model that is asked for, or say why there is none."""
    setup, levels = federation.setup.at(server.round), federation.capacities.levels
    method = setup.method
    if client is not None:
        own = federation.participant(client, server.round).capacity
        if capacity not in (None, own):
            raise ExportError(f"client {client} has capacity {own:g}; leave --capacity out, or --client")
        return own
    if not method.has_global_model(setup.network(levels[0])):
        why = "every client has its own" if method.space == "personal" else "a part of every model is private"
        raise ExportError(
            f"{method.name} has no server's model: {why}; choose a client with --client 0 to "
            f"{federation.population - 1}"
        )
    served = method.served(levels)
    if capacity is not None and capacity not in served:
        known = ", ".join(f"{level:g}" for level in served)
        same = "" if method.adapts else f" ({method.name} has one network, whatever the capacity)"
        raise ExportError(f"capacity {capacity:g} was not trained; there is {known}{same}")
    return served[0] if capacity is None else capacity


def _as_trained(federation: Federation, server: Server, who: Participant) -> nn.Module:
    """Fill the network that a client trains as the client does, but for what a codec rounds."""
    setup, store = federation.setup.at(server.round), federation.store
    method, network = setup.method, copy.deepcopy(setup.network(who.capacity))
    view = method.prepare(server.tensors, {who.capacity: network})
    plan = method.plan(view, who, network, None)
    down = method.download(view, who, plan, HeldTensors(store, "server"), network)
    kept: Tensors
    if who.client < 0:
        # The server's model has no client's part: what is added to its own is nothing.
        kept = {name: torch.zeros_like(tensors_of(network)[name]) for name in method.private_names(network)}
    else:
        state = kept_of(federation.setup, store.read("client", who.client), server.round)
        kept = state.get("kept") or setup.kept(who.capacity)
    method.use(network, down, kept)
    return with_statistics(network, server.statistics[who.capacity]) if method.calibrates else network


def _batch(task: Task, client: int | None, with_data: bool) -> tuple[Tensor, str]:
    """Return inputs to compare models on, and what they are."""
    data = task.data
    if not with_data:
        example, rng = data.example, torch.Generator().manual_seed(0)
        shape = (CHECKED, *example.shape)
        if example.is_floating_point():
            return torch.randn(shape, generator=rng, dtype=example.dtype), "random inputs, for want of the data"
        return torch.randint(2, shape, generator=rng, dtype=example.dtype), "random tokens, for want of the data"
    examples, what = _tests(task, client)
    if examples is None:
        examples, what = data.of(client or 0), f"training examples of client {client or 0}"
    inputs = examples[0][:CHECKED]
    return data.transform.test(inputs), f"{len(inputs)} of the {what}"


def _tests(task: Task, client: int | None) -> tuple[Examples | None, str]:
    if client is None:
        return task.data.central, "central test examples"
    return task.data.own_test(client), f"test examples of client {client}"


def _scores(task: Task, model: nn.Module, client: int | None) -> tuple[dict[str, float], str]:
    examples, what = _tests(task, client)
    return ({}, "") if examples is None else (task.evaluate(model, examples), what)


def _answers(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.no_grad():
        answers: Tensor = model(batch)
    return answers


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two outputs as a share of the largest output."""
    if ours.shape != theirs.shape:
        raise ExportError(f"the outputs have shapes {list(ours.shape)} and {list(theirs.shape)}")
    scale = float(theirs.double().abs().max())
    return float((ours.double() - theirs.double()).abs().max()) / max(scale, torch.finfo(torch.float32).tiny)


def _limit(model: nn.Module) -> float:
    return APART[next((p.dtype for p in model.parameters()), torch.float32)]


# Norms that normalise by their batch: what is written must not depend on its neighbours.


def _loose(model: nn.Module) -> list[str]:
    """Return the batch norms without statistics of their own."""
    return [name for name, norm in batch_norms(model).items() if norm.running_mean is None]


def _check_norms(run: Run, federation: Federation, server: Server, level: float, with_data: bool) -> None:
    setup = federation.setup.at(server.round)
    loose = _loose(setup.network(level))
    if with_data or not loose or (setup.method.calibrates and level in server.statistics):
        return
    raise ExportError(
        f"{loose[0]} and the other batch norms of {run.directory} keep no statistics; they are estimated on training "
        "data, which is needed for it"
    )


def _frozen(model: nn.Module, federation: Federation, client: int | None, *, calibrated: bool) -> str:
    """Give batch norms that have none fixed statistics, of training data; say what the statistics are."""
    if not batch_norms(model):
        return ""
    if calibrated:
        return "estimated on all clients' training data after training, and frozen"
    if not _loose(model):
        return "gathered while training, and averaged like weights where they are shared"
    setup, data = federation.setup, federation.setup.task.data
    if client is not None:
        rows = data.train_of[client]
    else:
        rows = torch.cat([data.train_of[one] for one in federation.rounds.measured(setup.training.seed, data.clients)])
    # Mixed, since that is what the model will meet.
    order = numpy_rng(setup.training.seed, "frozen norms").permutation(len(rows))[:FROZEN_ON]
    rows, first = rows[torch.from_numpy(order)], next(iter(model.parameters()))
    with torch.no_grad(), watched_norms(model) as statistics:
        for part in torch.split(rows, FROZEN_BATCH):
            model(like(data.transform.test(data.train[0][part]), first))
    with_statistics(model, statistics())
    whose = "of all clients" if client is None else f"of client {client}"
    return (
        f"estimated on {len(rows):,} training examples {whose} and frozen; while training every batch had its own, and "
        "scores of the run were measured so"
    )


# The code of the network.


@dataclass(frozen=True)
class Code:
    """How the plain network is built without this library."""

    line: str
    """Imports it."""
    call: str
    text: str | None = None
    """Source that has to lie beside the weights, where no package of the user's has it."""
    reason: str = ""
    """Why there is none."""


def _architecture(taken: Taken) -> Code:
    """Find how the plain network is built: the recipe's model at one of the widths that the method asks for."""
    run, setup = taken.run, taken.result.federation.setup.at(taken.result.server.round)
    table, wanted = run.recipe.tables["model"], _shapes(taken.model)
    options = model_options(table, run.task["classes"])
    if "weight_norm" in options:
        options["weight_norm"] = False  # composed weights are ordinary ones
    builder, asked = builder_of(table["name"]), list[float]()
    module, _, name = table["name"].rpartition(":")
    module, name = (module, name) if module else (builder.__module__, builder.__qualname__)

    def build(width: float) -> nn.Module:
        asked.append(width)
        return setup.task.build(width)

    with seeded(derive(setup.training.seed, "init")):
        setup.method.network(build, taken.capacity)
    for width in dict.fromkeys([*asked, 1.0]):
        given = options | ({"width": options["width"] * width} if "width" in options else {})
        if _shapes(builder(**given)) == wanted:
            break
    else:
        reason = f"{table['name']} builds no network with the tensors of the composed one"
        return Code("", "", reason=f"{reason}; .pt2 and .onnx hold the network too")
    arguments = ", ".join(f"{key}={value!r}" for key, value in given.items())
    if module.startswith("fedfactor."):
        return Code("", "build()", _source(module, f"{name}({arguments})"))
    return Code(f"from {module} import {name}", f"{name}({arguments})")


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(model).items()}


def _source(module: str, call: str) -> str:
    """Write a module of the network alone: the files that define it, without what only this library needs."""
    bodies: dict[str, str] = {}
    imports: dict[str, None] = {}
    _collect(module, bodies, imports)
    head = f"{HEAD}\n# From fedfactor {fedfactor.__version__} (Apache-2.0).\n\n" + "\n".join(imports)
    build = f'def build():\n    """Return the network, untrained."""\n    return {call}'
    return "\n\n\n".join([head, *bodies.values(), build]) + "\n"


def _collect(module: str, bodies: dict[str, str], imports: dict[str, None]) -> None:
    """Add a module of ours after those it imports from, without its docstring, imports and entries in registries."""
    text = inspect.getsource(importlib.import_module(module))
    dropped = set[int]()
    for number, node in enumerate(ast.parse(text).body):
        spans: list[ast.stmt | ast.expr] = []
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            spans.append(node)
            source = str(getattr(node, "module", ""))
            if not source.startswith("fedfactor."):
                imports[ast.unparse(node)] = None
            elif source != "fedfactor.models.registry" and source not in bodies:
                _collect(source, bodies, imports)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            spans += [one for one in node.decorator_list if ast.unparse(one).startswith("register(")]
        elif number == 0 and isinstance(node, ast.Expr):
            spans.append(node)
        for span in spans:
            # A decorator's line starts with the sign before it.
            dropped |= set(range(span.lineno, (span.end_lineno or span.lineno) + 1))
    kept = [line for number, line in enumerate(text.splitlines(), start=1) if number not in dropped]
    bodies[module] = "\n".join(kept).strip()


def _write_code(path: Path, text: str) -> None:
    if path.exists() and not path.read_text(encoding="utf-8").startswith(HEAD):
        raise ExportError(f"{path} is somebody else's file, and the network's code would go there; choose another name")
    path.write_text(text, encoding="utf-8")


def _word(stem: str) -> str:
    """Turn a file's name into one that Python can import."""
    return re.sub(r"\W|^(?=\d)", "_", stem)


# Files.


class Format:
    """A way to write a model down."""

    needs: ClassVar[str]
    """Packages that read it."""
    needs_code: ClassVar[bool] = False
    """Whether the network's code must lie beside it."""

    def check(self) -> None:
        """Raise a sentence if what writes this is not installed."""

    def write(self, taken: Taken, path: Path) -> None:
        """Write the model."""
        raise NotImplementedError

    def answers(self, path: Path, taken: Taken, code: Code) -> Tensor:
        """Read the file and run what it holds on the batch."""
        raise NotImplementedError

    def snippet(self, path: Path, taken: Taken, code: Code) -> str:
        """Return Python that reads and runs it."""
        raise NotImplementedError


class Safetensors(Format):
    """Tensors only; the network's code lies beside them, or in the user's own package."""

    needs = "torch safetensors"
    needs_code = True

    def write(self, taken: Taken, path: Path) -> None:
        """Write the tensors, tied ones once."""
        fields = {"run": taken.run.recipe.tables["name"], "round": taken.result.server.round}
        path.write_bytes(encode(Message("model", fields, tensors_of(taken.model))))

    def answers(self, path: Path, taken: Taken, code: Code) -> Tensor:
        """Build the network by its code and fill it from the file."""
        if code.reason:
            raise ExportError(code.reason)
        scope: dict[str, Any] = {"__name__": "architecture"}
        exec(compile(code.text or code.line, "architecture", "exec", dont_inherit=True), scope)
        model: nn.Module = eval(code.call, scope)
        fill(model, read_weights(path))
        return _answers(model.eval(), taken.batch)

    def snippet(self, path: Path, taken: Taken, code: Code) -> str:
        """Build, fill, use."""
        line = code.line or f"from {_word(path.stem)}_architecture import build"
        return (
            f"import torch\nfrom safetensors.torch import load_model\n{line}\n\n"
            f'model = {code.call}\nload_model(model, "{path.name}")\nlogits = model.eval()({_zeros(taken)})\n'
        )


class Pt2(Format):
    """Tensors and graph, as `torch.export` writes them; the size of a batch is free."""

    needs = "torch"

    def write(self, taken: Taken, path: Path) -> None:
        """Trace the model and write the graph."""
        torch.export.save(traced(taken), path)

    def answers(self, path: Path, taken: Taken, code: Code) -> Tensor:
        """Read the graph and run it."""
        return _answers(torch.export.load(path).module(), taken.batch)

    def snippet(self, path: Path, taken: Taken, code: Code) -> str:
        """Load, use."""
        return f'import torch\n\nmodel = torch.export.load("{path.name}").module()\nlogits = model({_zeros(taken)})\n'


class Onnx(Format):
    """Tensors and graph for ONNX runtimes; the size of a batch is free."""

    needs = "onnxruntime"

    def check(self) -> None:
        """The exporter of torch and the runtime that checks its work are packages of their own."""
        missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
        if missing:
            raise ExportError(f".onnx needs {', '.join(missing)}: pip install 'fedfactor[onnx]'")

    def write(self, taken: Taken, path: Path) -> None:
        """Trace the model and write the graph, tensors inside."""
        program, registry = traced(taken), logging.getLogger("torch.onnx._internal.exporter._registration")
        with warnings.catch_warnings():
            # Of torch's own code, which no reader of ours can change; and that torchvision is not there.
            warnings.simplefilter("ignore", FutureWarning)
            registry.disabled = True
            torch.onnx.export(
                program, f=path, input_names=["input"], output_names=["logits"], external_data=False, verbose=False
            )
            registry.disabled = False

    def answers(self, path: Path, taken: Taken, code: Code) -> Tensor:
        """Run the graph in a runtime that has no torch in it."""
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(["logits"], {"input": taken.batch.numpy()})[0])

    def snippet(self, path: Path, taken: Taken, code: Code) -> str:
        """Load, use."""
        shape = (1, *taken.batch.shape[1:])
        kind = str(taken.batch.dtype).removeprefix("torch.")
        return (
            f'import numpy\nimport onnxruntime\n\nmodel = onnxruntime.InferenceSession("{path.name}")\n'
            f'logits = model.run(["logits"], {{"input": numpy.zeros({shape}, "{kind}")}})[0]\n'
        )


FORMATS: dict[str, type[Format]] = {".safetensors": Safetensors, ".pt2": Pt2, ".onnx": Onnx}


def traced(taken: Taken) -> torch.export.ExportedProgram:
    """Trace a model for batches of any size."""
    try:
        with torch.no_grad():
            return torch.export.export(
                taken.model, (taken.batch,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=False
            )
    except Exception as error:  # torch raises many kinds here
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(f"torch.export cannot trace this model ({reason}); .safetensors needs no graph") from error


def _zeros(taken: Taken) -> str:
    kind = "" if taken.batch.dtype == torch.float32 else f", dtype={taken.batch.dtype}"
    return f"torch.zeros({', '.join(map(str, (1, *taken.batch.shape[1:])))}{kind})"


# The card.


def _card(taken: Taken, path: Path, snippet: str, form: Format, code: Path | None, apart: float) -> str:
    """Say what a model is, what it learnt from, how good it is and what it cost."""
    run, result, facts = taken.run, taken.result, taken.run.task
    recipe, method = run.recipe, result.federation.setup.at(result.server.round).method
    paper = entries("methods")[recipe.method.name].paper
    totals = result.server.totals
    whose = f"the model of client {taken.client}" if taken.client is not None else "the server's model"
    settings = ", ".join(f"{key} = {value!r}" for key, value in recipe.tables["method"].items() if key != "name")
    count = sum(tensor.numel() for tensor in taken.model.parameters())
    measured = _journal(taken)
    lines = [
        f"# {path.name}",
        "",
        f"{whose[0].upper()}{whose[1:]} of the run `{recipe.tables['name']}` after {result.server.round} of "
        f"{recipe.rounds.rounds} rounds" + (f", at capacity {taken.capacity:g}" if method.adapts else "") + ".",
        "",
        "```python",
        snippet.rstrip(),
        "```",
        "",
        f"Needs: `pip install {form.needs}`" + (f", and [{code.name}]({code.name}) beside it." if code else "."),
        "",
        "| | |",
        "|---|---|",
        f"| network | `{recipe.tables['model']['name']}`, {count:,} parameters, ordinary layers |",
        f"| input | (batch, {', '.join(map(str, taken.batch.shape[1:]))}) of "
        f"{str(taken.batch.dtype).removeprefix('torch.')}, made by `{facts['transform']}` from "
        f"{facts['input_dtype']} as the data set has it |",
        f"| output | {_output(facts)} |",
        f"| data | `{recipe.tables['data']['name']}` over {facts['clients']} clients, partition "
        f"`{recipe.tables['partition']['kind']}` |",
        f"| method | `{recipe.method.name}`{f' ({paper})' if paper else ''}{f': {settings}' if settings else ''} |",
        f"| optimizer, codec | `{recipe.optimizer.name}`, `{recipe.codec.name}` |",
        f"| accuracy | {_accuracy(taken)} |",
        *([f"| accuracy in the run | {measured} |"] if measured else []),
        f"| bytes | {totals['bytes_down']:,} down, {totals['bytes_up']:,} up, all clients and rounds |",
        f"| multiply-accumulates | {totals['macs']:.4g} forward, in training |",
        *([f"| norm statistics | {taken.norms} |"] if taken.norms else []),
        f"| checked | on {taken.batch_of}: differs from the network as trained by {taken.difference:.1e} of the "
        f"largest output, read back from the file by {apart:.1e} |",
        f"| made by | fedfactor {fedfactor.__version__}, torch {torch.__version__} |",
        "",
        "The recipe, every default written out:",
        "",
        "```toml",
        recipe.to_toml().rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _output(facts: dict[str, Any]) -> str:
    if facts["kind"] == "binary":
        return "(batch, 1) logits; above 0 means yes"
    names = [str(name) for name in facts["class_names"]]
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"(batch, {facts['classes']}) logits: {shown}".replace("|", "\\|").replace("\n", " ")


def _accuracy(taken: Taken) -> str:
    if not taken.scores:
        return "not measured"
    return f"{taken.scores['accuracy']:.4f} on {taken.scores['examples']:.0f} {taken.tested}"


def _journal(taken: Taken) -> str:
    """Return what the run itself measured last of this model."""
    for event in reversed(taken.run.metrics):
        key = f"{taken.capacity:g}"
        if taken.client is None and key in event.get("global", {}):
            return f"{event['global'][key]['accuracy']:.4f} in round {event['round']}, on the central test set"
        for measured, when in OWN.items():
            scores = event.get(measured, {})
            if taken.client is not None and taken.client in scores.get("who", []):
                own = scores["each"][scores["who"].index(taken.client)]
                return f"{own:.4f} in round {event['round']}, {when}"
    return ""


OWN = {"all": "on its own test data", "selected_after": "on its own test data, right after it had trained"}
"""Measurements of a client's own model."""
