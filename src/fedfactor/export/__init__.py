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

from dataclasses import dataclass
from pathlib import Path

from fedfactor.export.card import card_text
from fedfactor.export.code import architecture, as_module, write_code
from fedfactor.export.formats import FORMATS
from fedfactor.export.taking import ExportError, answers, difference, limit, take
from fedfactor.runs.open import Run

__all__ = ["FORMATS", "ExportError", "Exported", "export"]


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
    code = architecture(taken)
    unfinished = path.with_name(f"{path.stem}.unfinished{path.suffix}")
    beside = path.with_name(f"{as_module(path.stem)}_architecture.py") if form.needs_code and code.text else None
    try:
        form.write(taken, unfinished)
        apart = difference(form.answers(unfinished, taken, code), answers(taken.model, taken.batch))
        if apart > limit(taken.model):
            raise ExportError(
                f"the file answers otherwise than the model ({apart:.1e} of its largest output); not written"
            )
        if beside is not None:
            write_code(beside, code.text or "")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    snippet = form.snippet(path, taken, code)
    card = path.with_suffix(".card.md")
    card.write_text(card_text(taken, path, snippet, form, beside, apart), encoding="utf-8")
    return Exported(path, card, beside, snippet, taken.difference, taken.scores.get("accuracy"))
