"""File formats of exported models."""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedfactor.export.code import NetworkCode, as_module, run_module
from fedfactor.export.taking import ExportError, Taken, answers
from fedfactor.nn import Tune, compose, factor_weights
from fedfactor.nn.state import fill, tensors_of
from fedfactor.protocol.message import Message, encode, read_weights
from fedfactor.runs.peft import NoAdapter, adapter_of, with_adapter, write_adapter
from fedfactor.support.install import install_command


class Format:
    """A file format: writes a model, reads it back and shows how to load it."""

    needs: ClassVar[str]
    """Packages needed to read the file."""
    needs_code: ClassVar[bool] = False
    """Whether reading the file needs the code of the network."""
    one_tensor: ClassVar[bool] = True
    """Whether the model's input must be one tensor."""

    def check(self) -> None:
        """Raise ExportError if a package that writes this format is not installed."""

    def write(self, taken: Taken, path: Path) -> None:
        """Write the model."""
        raise NotImplementedError

    def answers(self, path: Path, taken: Taken, code: NetworkCode) -> Tensor:
        """Read the file and return the model's outputs for the batch."""
        raise NotImplementedError

    def snippet(self, path: Path, taken: Taken, code: NetworkCode) -> str:
        """Return Python code that loads and runs the model."""
        raise NotImplementedError


class Safetensors(Format):
    """Tensors only; the code of the network is in a file beside them, or in the user's package."""

    needs = "torch safetensors"
    needs_code = True
    one_tensor = False

    def write(self, taken: Taken, path: Path) -> None:
        """Write the tensors; tied tensors are written once."""
        fields = {"run": taken.run.recipe.tables["name"], "round": taken.result.server.round}
        path.write_bytes(encode(Message("model", fields, tensors_of(taken.model)), format="pt"))

    def answers(self, path: Path, taken: Taken, code: NetworkCode) -> Tensor:
        """Build the network from its code and load the tensors from the file."""
        if code.reason:
            raise ExportError(code.reason)
        model: nn.Module = eval(code.call, run_module(code.text or code.line))
        fill(model, read_weights(path))
        return answers(model.eval(), taken.batch)

    def snippet(self, path: Path, taken: Taken, code: NetworkCode) -> str:
        """Return code that builds the network, loads the tensors and runs the model."""
        line = code.line or f"from {as_module(path.stem)}_architecture import build"
        called = f"logits = model.eval()({_zeros(taken)})" if isinstance(taken.batch, Tensor) else "model.eval()"
        return (
            f"import torch\nfrom safetensors.torch import load_model\n{line}\n\n"
            f'model = {code.call}\nload_model(model, "{path.name}")\n{called}\n'
        )


class Pt2(Format):
    """Tensors and graph, written by `torch.export`, for batches of any size."""

    needs = "torch"

    def write(self, taken: Taken, path: Path) -> None:
        """Trace the model and write the graph."""
        buffer = io.BytesIO()  # because torch ends the process if it writes to a full disk itself
        torch.export.save(traced(taken), buffer)
        path.write_bytes(buffer.getbuffer())

    def answers(self, path: Path, taken: Taken, code: NetworkCode) -> Tensor:
        """Read the graph and run it on the batch."""
        return answers(torch.export.load(path).module(), taken.batch)

    def snippet(self, path: Path, taken: Taken, code: NetworkCode) -> str:
        """Return code that loads and runs the model."""
        return f'import torch\n\nmodel = torch.export.load("{path.name}").module()\nlogits = model({_zeros(taken)})\n'


class Onnx(Format):
    """Tensors and graph for ONNX runtimes, for batches of any size."""

    needs = "onnxruntime"

    def check(self) -> None:
        """Raise ExportError if a package that torch's exporter or the check of the file needs is missing."""
        missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
        if missing:
            raise ExportError(f".onnx needs {', '.join(missing)}: {install_command('onnx')}")

    def write(self, taken: Taken, path: Path) -> None:
        """Trace the model and write the graph with its tensors."""
        program, registry = traced(taken), logging.getLogger("torch.onnx._internal.exporter._registration")
        with warnings.catch_warnings():
            # Warnings of torch's own code, and a message that torchvision is not installed.
            warnings.simplefilter("ignore", FutureWarning)
            registry.disabled = True
            torch.onnx.export(
                program, f=path, input_names=["input"], output_names=["logits"], external_data=False, verbose=False
            )
            registry.disabled = False

    def answers(self, path: Path, taken: Taken, code: NetworkCode) -> Tensor:
        """Run the graph in ONNX Runtime, without torch."""
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(["logits"], {"input": taken.batch.numpy()})[0])

    def snippet(self, path: Path, taken: Taken, code: NetworkCode) -> str:
        """Return code that loads and runs the model."""
        shape = (1, *taken.batch.shape[1:])
        kind = str(taken.batch.dtype).removeprefix("torch.")
        return (
            f'import numpy\nimport onnxruntime\n\nmodel = onnxruntime.InferenceSession("{path.name}")\n'
            f'logits = model.run(["logits"], {{"input": numpy.zeros({shape}, "{kind}")}})[0]\n'
        )


class Adapter(Format):
    """A folder in PEFT's format: the change of a frozen base, and tensors that were trained whole."""

    needs = "peft"
    one_tensor = False

    def write(self, taken: Taken, path: Path) -> None:
        """Write configuration and tensors into a new folder."""
        table = {} if taken.run.recipe.from_python else taken.run.recipe.tables["model"]
        try:
            config, tensors = adapter_of(taken.trained, table.get("pretrained") or "")
        except NoAdapter as reason:
            raise ExportError(f"there is no adapter in PEFT's format: {reason}; {MERGE}") from None
        path.mkdir(exist_ok=True)
        write_adapter(path, config, encode(Message("adapter", {}, tensors), format="pt"))

    def answers(self, path: Path, taken: Taken, code: NetworkCode) -> Tensor:
        """Give the adapter to the base and run the result on the batch."""
        base = taken.result.federation.setup.build()
        for layer in factor_weights(base).values():
            layer.scale = 0.0  # without the change that an earlier adapter may have brought
        try:
            model = with_adapter(compose(base), replace(taken.run.recipe.tune or Tune(), adapter=str(path)))
        except ValueError as reason:
            raise ExportError(f"{reason}; {MERGE}") from None
        return answers(compose(model).eval(), taken.batch)

    def snippet(self, path: Path, taken: Taken, code: NetworkCode) -> str:
        """Return code that gives the adapter to the base."""
        line, call = (code.line, code.call) if code.line else ("", "...")
        load = f'model = PeftModel.from_pretrained(base, "{path.name}")'
        return f"from peft import PeftModel\n{line}\n\nbase = {call}  # with the weights of the frozen base\n{load}\n"


MERGE = "--merge writes the merged model instead"

FORMATS: dict[str, type[Format]] = {".safetensors": Safetensors, ".pt2": Pt2, ".onnx": Onnx}


def traced(taken: Taken) -> torch.export.ExportedProgram:
    """Trace a model for batches of any size; raise ExportError if torch cannot."""
    try:
        with torch.no_grad():
            return torch.export.export(
                taken.model, (taken.batch,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=False
            )
    except Exception as error:  # torch raises many kinds here
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(f"torch.export cannot trace this model ({reason}): choose .safetensors instead") from error


def _zeros(taken: Taken) -> str:
    kind = "" if taken.batch.dtype == torch.float32 else f", dtype={taken.batch.dtype}"
    return f"torch.zeros({', '.join(map(str, (1, *taken.batch.shape[1:])))}{kind})"
