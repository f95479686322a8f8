"""The source code that builds an exported network: a file beside its weights, or an import of the user's package."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

import fedfactor
from fedfactor.export.taking import ExportError, Taken
from fedfactor.nn.state import tensors_of
from fedfactor.rng import derive, seeded
from fedfactor.runs.sections import builder_of
from fedfactor.runs.tasks import model_options
from fedfactor.support.files import write_text

HEAD = "# Plain torch: the network of the weights beside this file."
"""First line of every file that is written here; a file without it is not overwritten."""


@dataclass(frozen=True)
class NetworkCode:
    """Python code that builds the plain network without this library."""

    line: str
    """Import statement; empty if `text` defines the network."""
    call: str
    """Expression that builds the network."""
    text: str | None = None
    """Source of the file to write beside the weights, if the network is not in a package of the user's."""
    reason: str = ""
    """Why no such code exists; otherwise empty."""


def architecture(taken: Taken) -> NetworkCode:
    """Return the code that builds the plain network: the recipe's model at one of the widths that the method uses."""
    run, setup = taken.run, taken.result.federation.setup.at(taken.result.server.round)
    wanted, asked = _shapes(taken.model), list[float]()
    if run.recipe.from_python:
        if not (found := _importable(run.given_model)):
            return NetworkCode("", "", reason=f"{run.model_name} cannot be imported: {CONTAINED}")
        builder, options = found, {"width": 1.0} if "width" in inspect.signature(found).parameters else {}
    else:
        table = run.recipe.tables["model"]
        builder, options = builder_of(table["name"]), model_options(table, taken.facts["classes"])
    if "weight_norm" in options:
        options["weight_norm"] = False  # composed weights are ordinary ones
    module, _, name = run.model_name.rpartition(":")
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
        reason = f"{run.model_name} does not build a network with the tensors of the exported one"
        return NetworkCode("", "", reason=f"{reason}: {CONTAINED}")
    arguments = ", ".join(f"{key}={value!r}" for key, value in given.items())
    if module.startswith("fedfactor.models."):
        return NetworkCode("", "build()", source(module, f"{name}({arguments})"))
    return NetworkCode(f"from {module} import {name}", f"{name}({arguments})")


CONTAINED = "choose .pt2 or .onnx, which contain the network itself"


def _importable(model: Any) -> Callable[..., nn.Module] | None:
    """Return a function or class that another process can import by its name; otherwise `None`."""
    module, name = getattr(model, "__module__", "__main__"), getattr(model, "__qualname__", "")
    there = module != "__main__" and getattr(sys.modules.get(module), name, None) is model
    return model if there and callable(model) else None


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(model).items()}


def source(module: str, call: str) -> str:
    """Return the source of a module that builds the network and imports torch alone.

    It consists of the package's modules that define the network, without their imports from each other.
    """
    sections: dict[str, str] = {}
    _collect(module, sections)
    head = f"{HEAD}\n# From fedfactor {fedfactor.__version__} (Apache-2.0).\n\n{FUTURE}"
    build = f'def build():\n    """Return the network, untrained."""\n    return {call}'
    return "\n\n".join([head, REGISTER, *sections.values(), build]) + "\n"


def _collect(module: str, sections: dict[str, str]) -> None:
    """Add the source of a module of this package to `sections`, after the modules that it imports from."""
    text = inspect.getsource(importlib.import_module(module))
    for imported in OWN_IMPORT.findall(text):
        if imported != "fedfactor.registry" and imported not in sections:
            _collect(imported, sections)
    sections[module] = OWN_IMPORT.sub("", text).replace(FUTURE, "")


OWN_IMPORT = re.compile(r"^from (fedfactor\.[\w.]+) import (?:\([^)]*\)|.+)\n", re.MULTILINE)
FUTURE = "from __future__ import annotations\n"
REGISTER = '''def register(*_, **__):
    """Stand in for fedfactor's list of networks: return the decorated function as it is."""
    return lambda build: build
'''


def run_module(text: str) -> dict[str, Any]:
    """Run the source of a module, as importing it would, and return its names."""
    module = ModuleType("architecture")
    sys.modules[module.__name__] = module  # dataclasses look up their module there
    try:
        exec(compile(text, module.__name__, "exec", dont_inherit=True), vars(module))
    finally:
        del sys.modules[module.__name__]
    return vars(module)


def write_code(path: Path, text: str) -> None:
    """Write the code; overwrite only files that were written by this function."""
    if path.exists() and not path.read_text(encoding="utf-8").startswith(HEAD):
        raise ExportError(f"{path} exists and was not written by an export: choose another name for the model")
    write_text(path, text)


def as_module(stem: str) -> str:
    """Turn a file name into the name of a Python module."""
    return re.sub(r"\W|^(?=\d)", "_", stem)
