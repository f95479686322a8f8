"""The code of a plain network: what has to lie beside its weights, or where the user's own package has it."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

from torch import nn

import fedfactor
from fedfactor.export.taking import ExportError, Taken
from fedfactor.nn.state import tensors_of
from fedfactor.rng import derive, seeded
from fedfactor.runs.sections import builder_of
from fedfactor.runs.tasks import model_options

HEAD = "# Plain torch: the network of the weights beside this file."


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


def architecture(taken: Taken) -> Code:
    """Find how the plain network is built: the recipe's model at one of the widths that the method asks for."""
    run, setup = taken.run, taken.result.federation.setup.at(taken.result.server.round)
    table, wanted = run.recipe.tables["model"], _shapes(taken.model)
    options = model_options(table, taken.facts["classes"])
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
        return Code("", "build()", source(module, f"{name}({arguments})"))
    return Code(f"from {module} import {name}", f"{name}({arguments})")


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(model).items()}


def source(module: str, call: str) -> str:
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
            elif source != "fedfactor.registry" and source not in bodies:
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


def write_code(path: Path, text: str) -> None:
    """Write the code, over nothing but what was written here before."""
    if path.exists() and not path.read_text(encoding="utf-8").startswith(HEAD):
        raise ExportError(f"{path} is somebody else's file, and the network's code would go there; choose another name")
    path.write_text(text, encoding="utf-8")


def as_module(stem: str) -> str:
    """Turn a file's name into one that Python can import."""
    return re.sub(r"\W|^(?=\d)", "_", stem)
