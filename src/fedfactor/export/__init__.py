"""Export a model of a run: plain torch in one file, checked, with a model card.

The server's model at one capacity, or a client's own model, is composed to ordinary layers and compared with the
trained network. It is then written, read back from the file and compared again. A file with other outputs is removed.

| file | content | needed to read it |
|---|---|---|
| `.safetensors` | the tensors of the plain network | torch, and the code that builds the network |
| `.pt2` | tensors and graph (`torch.export`) | torch alone |
| `.onnx` | tensors and graph | any ONNX runtime |
| a folder | the adapter of a fine-tuned model in PEFT's format | peft, and the base |
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfactor.export.card import card_text
from fedfactor.export.code import architecture, as_module, write_code
from fedfactor.export.formats import FORMATS, Adapter
from fedfactor.export.taking import ExportError, answers, difference, limit, take
from fedfactor.runs.open import Model, Run
from fedfactor.support.files import naming, write_text

__all__ = ["FORMATS", "ExportError", "Exported", "export"]


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    path: Path
    card: Path
    architecture: Path | None
    """File with the code of the network, if neither the model file nor a package of the user's contains it."""
    snippet: str
    """Python code that loads the file without this library."""
    difference: float
    """Largest difference from the outputs of the trained network, as a share of the largest output."""
    scores: Mapping[str, float]
    """Metrics of the exported model on the test data; empty without test data."""

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the test data; `None` without test data, or if the task has no classes."""
        return self.scores.get("accuracy")


def export(
    directory: Path | str,
    path: Path | str,
    *,
    capacity: float | None = None,
    client: int | None = None,
    round: int | None = None,
    data_dir: Path | str | None = None,
    with_data: bool = True,
    model: Model | str | None = None,
    merge: bool = False,
) -> Exported:
    """Write a model of a run to `path`, in the format of its suffix, and a model card beside it.

    A path without a suffix is a folder: the adapter of a fine-tuned model in PEFT's format, or with `merge` the whole
    model as `model.safetensors`, with the tensor names of the base.

    Args:
        directory: The run directory.
        path: File to write: `.safetensors`, `.pt2` or `.onnx`; or a folder.
        capacity: Capacity of the server's model; by default the largest.
        client: Export the model of this client instead of the server's.
        round: A round listed in `run.keep_rounds`; by default the last round.
        data_dir: Where data sets are.
        with_data: Whether to load the data. Without data, models are compared on random inputs and not evaluated. The
            data of a run that was started by `simulate` cannot be loaded.
        model: The network of a run that was started by `simulate`, or `package.module:function`: see `fedfactor.load`.
        merge: Into a folder, write the whole model instead of its adapter. Files always have the whole model.
    """
    path = Path(path)
    if path.suffix not in {"", *FORMATS}:
        raise ExportError(f"the suffix of the file must be one of {', '.join(FORMATS)}; got {path}")
    if not path.parent.is_dir():
        raise ExportError(f"there is no directory {path.parent}: create it first")
    run = Run(directory, round, model)
    folder = path if merge and not path.suffix else None
    if folder is not None:
        folder.mkdir(exist_ok=True)
        path = folder / "model.safetensors"
    if not path.suffix and run.recipe.tune is None:
        raise ExportError(f"{directory} has no [tune], so it has no adapter: give a file, such as {path}.safetensors")
    form = FORMATS[path.suffix]() if path.suffix else Adapter()
    form.check()
    taken = take(run, capacity, client, data_dir, with_data, form.one_tensor)
    code = architecture(taken)
    unfinished = path.with_name(f"{path.stem}.unfinished{path.suffix}")
    beside = path.with_name(f"{as_module(path.stem)}_architecture.py") if form.needs_code and code.text else None
    try:
        with naming(unfinished):
            form.write(taken, unfinished)
        apart = difference(form.answers(unfinished, taken, code), answers(taken.model, taken.batch))
        if apart > limit(taken.model):
            raise ExportError(
                f"the outputs of the file differ from those of the model ({apart:.1e} of the largest): not written"
            )
        if beside is not None:
            write_code(beside, code.text or "")
        if path.suffix:
            unfinished.replace(path)
        else:
            path.mkdir(exist_ok=True)
            for file in unfinished.iterdir():
                file.replace(path / file.name)
    finally:
        if path.suffix:
            unfinished.unlink(missing_ok=True)
        else:
            shutil.rmtree(unfinished, ignore_errors=True)
    config: Any = getattr(taken.model, "config", None)
    if folder is not None and hasattr(config, "to_json_string"):  # so that transformers knows the class of its model
        write_text(folder / "config.json", config.to_json_string())
    snippet = form.snippet(path, taken, code)
    card = path.with_suffix(".card.md") if path.suffix else path / "README.md"
    write_text(card, card_text(taken, path, snippet, form, beside, apart))
    return Exported(path, card, beside, snippet, taken.difference, taken.scores)
