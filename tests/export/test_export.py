"""`fedfactor export`: what is written answers as what was trained, and needs nothing of this library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model

import fedfactor
from fedfactor import models
from fedfactor.export import FORMATS, ExportError, export
from fedfactor.export.code import run_module, source
from fedfactor.export.formats import Safetensors
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.message import read_weights
from fedfactor.registry import create
from fedfactor.runs.directory import RunError
from fedfactor.runs.execute import run
from fedfactor.runs.recipe import override, resolve
from fedfactor.runs.sections import builder_of
from fedfactor.server.result import Result
from tests.helpers.tiny import METHODS, Tiny

TABLES: dict[str, Any] = {
    "name": "tiny",
    "seed": 5,
    "data": {"name": "digits", "test_share": 0.8},
    "partition": {"kind": "iid", "clients": 6},
    "model": {"name": "tests.helpers.tiny:Tiny"},
    "capacities": {"levels": [1.0, 0.5], "shares": [0.5, 0.5]},
    "train": {"rounds": 2, "cohort": 3, "epochs": 2, "batch_size": 20, "lr": 0.05},
}
ALONE = "import sys\nsys.modules['fedfactor'] = None  # importing it raises\n"


def trained(folder: Path, *assignments: str) -> Path:
    run(resolve(override(TABLES, list(assignments)), "tiny.toml"), folder)
    return folder


def answers(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(x)


def filled(path: Path) -> Tiny:
    """Load a file as its snippet does; the file says how wide the network is."""
    plain = Tiny(len(read_weights(path)["bn1.weight"]) / 8)
    load_model(plain, path)
    return plain


PLAIN = [method for method in METHODS if create("methods", method).traits.plain]


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(PLAIN)))
def test_a_method_without_plain_models_says_so(method: str, tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", f"method.name={method}")
    with pytest.raises(ExportError, match="weights depend on the batch"):
        export(folder, tmp_path / "model.safetensors", client=0)


@pytest.mark.parametrize("method", PLAIN)
def test_every_other_method_has_a_model_to_take_away(method: str, tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", f"method.name={method}")
    opened, out, x = fedfactor.load(folder), tmp_path / "model.safetensors", torch.randn(5, 1, 8, 8)
    result = opened.result()
    method_now = result.federation.setup.at(2).method
    wanted: list[dict[str, Any]] = [{"client": client} for client in (0, 5)]
    if result.federation.setup.has_global_model:
        wanted += [{"capacity": level} for level in method_now.served([1.0, 0.5])]
    else:
        with pytest.raises(ExportError, match=f"{method} has no server's model: .*--client 0 to 5"):
            export(folder, out)
    for choice in wanted:
        found = export(folder, out, **choice)
        card, plain = found.card.read_text(), filled(out)
        assert found.snippet in card and found.difference < 1e-4
        level = choice.get("capacity")
        theirs = result.model_at(level) if level else result.client_model(choice["client"])
        if theirs.bn1.running_mean is None:
            assert "training examples" in card and "frozen" in card
            for norm in (plain.bn1, plain.bn2):
                norm.running_mean = norm.running_var = None
        torch.testing.assert_close(answers(plain, x), answers(theirs, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_snippet_runs_where_the_library_is_not(suffix: str, tmp_path: Path) -> None:
    ours = ("model={name='digits_cnn', width=0.25}", "method={name='fedpara', gamma=0.3}")
    folder = trained(tmp_path / "run", *ours)
    found = export(folder, tmp_path / f"my-model{suffix}")
    data = fedfactor.load(folder).result().federation.setup.task.data
    batch = data.transform.test(data.central[0][:9])
    torch.save(batch, tmp_path / "batch.pt")
    call = 'model.run(["logits"], {"input": batch.numpy()})[0]' if suffix == ".onnx" else "model(batch)"
    script = (
        f"{ALONE}{found.snippet}\nassert logits.shape == (1, 10)\nimport json, torch\nbatch = torch.load('batch.pt')\n"
        f"print(json.dumps({call}.tolist()))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len([line for line in found.snippet.splitlines() if line]) <= 6
    wanted = answers(fedfactor.load(folder).model(), batch)
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)), wanted, rtol=1e-4, atol=1e-5)


def test_the_card_says_what_the_model_is(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", "method={name='fedpara', gamma=0.3}")
    found = export(folder, tmp_path / "model.safetensors")
    card, summary = found.card.read_text(), json.loads((folder / "summary.json").read_text())
    final = summary["measured"]["global"]["final"]
    assert found.accuracy == pytest.approx(final, abs=0.005)  # composed weights may tip an example over
    for words in (
        "# model.safetensors", "The server's model of the run `tiny` after 2 of 2 rounds.",
        "from tests.helpers.tiny import Tiny", "`digits` over 6 clients, partition `iid`",
        "`fedpara` (arXiv:2108.06098): ", "gamma = 0.3", f"{summary['bytes_down']:,} down, {summary['bytes_up']:,} up",
        f"{final:.4f} in round 2, on the central test set", f"{found.accuracy:.4f} on ", "central test examples",
        "of float32: `(x / 255 - [0]) / [0.0627451]`, where x is uint8", "collected during training", "[model]\nname = ",
    ):  # fmt: skip
        assert words in card, words
    assert found.architecture is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.card.md", "model.safetensors", "run"]


@pytest.mark.parametrize(("choice", "whose"), [({}, "all clients"), ({"client": 3}, "client 3")])
def test_norms_that_used_their_batch_get_statistics_of_training_data(
    choice: dict[str, int], whose: str, tmp_path: Path
) -> None:
    folder = trained(tmp_path / "run", "method.name=prism")
    found = export(folder, tmp_path / "model.safetensors", **choice)
    plain, data = filled(found.path), fedfactor.load(folder).result().federation.setup.task.data
    rows = data.train_of[3] if choice else torch.cat(list(data.train_of))
    inside: list[torch.Tensor] = []
    plain.bn1.register_forward_pre_hook(lambda module, inputs: inside.append(inputs[0]))
    answers(plain, data.transform.test(data.train[0][rows]))
    torch.testing.assert_close(plain.bn1.running_mean, inside[0].mean((0, 2, 3)), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(plain.bn1.running_var, inside[0].var((0, 2, 3)), rtol=1e-3, atol=1e-4)
    assert f"estimated on {len(rows)} training examples of {whose} and frozen" in found.card.read_text()
    with pytest.raises(ExportError, match="keep no statistics; they are estimated on training data"):
        export(folder, tmp_path / "other.pt2", with_data=False, **choice)
    assert not (tmp_path / "other.pt2").exists()


def test_a_run_directory_is_enough(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", "method.name=heterofl")
    for choice in ({}, {"capacity": 0.5}):
        found = export(folder, tmp_path / "model.safetensors", data_dir=tmp_path, with_data=False, **choice)
        card = found.card.read_text()
        assert found.accuracy is None and "| accuracy | not measured |" in card and "random inputs" in card
        assert "estimated on all clients' training data after training, and frozen" in card


def test_a_kept_round(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", "run.keep_rounds=[1]")
    found = export(folder, tmp_path / "model.safetensors", round=1)
    theirs = tensors_of(fedfactor.load(folder, round=1).model())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tensors_of(filled(found.path)).items())
    assert "after 1 of 2 rounds" in found.card.read_text()


def test_mistakes_are_named(tmp_path: Path) -> None:
    folder, out = trained(tmp_path / "run", "method.name=heterofl"), tmp_path / "model.safetensors"
    capacity = fedfactor.load(folder).result().federation.dispatch.participant(2, 2).capacity
    for words, changes in (
        (r"there is no client 6: the run has 6, counted from 0", {"client": 6}),
        (r"capacity 0\.75 was not trained; there is 1, 0\.5", {"capacity": 0.75}),
        (rf"client 2 has capacity {capacity:g}; leave --capacity out", {"client": 2, "capacity": 0.3}),
        (r"\.safetensors, \.pt2, \.onnx; got", {"path": tmp_path / "model.bin"}),
        (r"there is no directory", {"path": tmp_path / "nowhere" / "model.pt2"}),
    ):
        with pytest.raises((ExportError, RunError), match=words):
            export(folder, **{"path": out, **changes})
    plain = trained(tmp_path / "plain")
    with pytest.raises(ExportError, match=r"0\.5 was not trained; there is 1 \(fedavg has one network"):
        export(plain, out, capacity=0.5)
    assert not out.exists()


def test_a_model_that_answers_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = trained(tmp_path / "run"), tmp_path / "model.safetensors"
    honest, write = Result.model_at, Safetensors.write

    def bent(self: Result, capacity: float) -> torch.nn.Module:
        model = honest(self, capacity)
        torch.nn.init.ones_(model.fc.bias)
        return model

    with monkeypatch.context() as patch:
        patch.setattr(Result, "model_at", bent)
        with pytest.raises(ExportError, match=r"composed model differs from the trained one by .* nothing was written"):
            export(folder, out)

    def wrong(self: Safetensors, taken: Any, path: Path) -> None:
        with torch.no_grad():
            taken.model.fc.bias += 1
            write(self, taken, path)
            taken.model.fc.bias -= 1

    monkeypatch.setattr(Safetensors, "write", wrong)
    with pytest.raises(ExportError, match="the outputs of the file differ from those of the model"):
        export(folder, out)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_code_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", "model={name='digits_cnn', width=0.125}")
    (tmp_path / "model_architecture.py").write_text("mine = 1\n")
    with pytest.raises(ExportError, match=r"model_architecture\.py exists and was not written by an export"):
        export(folder, tmp_path / "model.safetensors")
    export(folder, tmp_path / "again.safetensors")
    export(folder, tmp_path / "again.safetensors")  # its own it may
    assert (tmp_path / "model_architecture.py").read_text() == "mine = 1\n"
    assert not (tmp_path / "model.safetensors").exists()


OURS = [name for name in models.list_models() if builder_of(name).__module__.startswith("fedfactor.")]


@pytest.mark.parametrize("name", OURS)
def test_every_network_of_ours_can_be_written_as_code(name: str) -> None:
    builder = builder_of(name)
    plain = {"weight_norm": False} if name == "lstm_shakespeare" else {}
    arguments = ", ".join(f"{key}={value}" for key, value in plain.items())
    text = source(builder.__module__, f"{builder.__name__}({arguments})")
    with torch.device("meta"):
        ours, theirs = builder(**plain), run_module(text)["build"]()
    assert not any(type(module).__module__.startswith("fedfactor") for module in theirs.modules())
    assert {n: t.shape for n, t in tensors_of(ours).items()} == {n: t.shape for n, t in tensors_of(theirs).items()}


def test_a_client_with_its_own_norm_statistics(tmp_path: Path) -> None:
    """They are estimated on the client's data, so without the data there is no such model."""
    folder = trained(tmp_path / "run", "method.name=fedper", "train.own_norms=true")
    found = export(folder, tmp_path / "own.safetensors", client=2)
    assert "estimated on the training data of client 2 after the last download" in found.card.read_text()
    with pytest.raises(ExportError, match=r"own_norms: .* export with the data"):
        export(folder, tmp_path / "without.safetensors", client=2, with_data=False)
    with pytest.raises(RunError, match=r"own_norms: .* call result\(data_dir\)"):
        fedfactor.load(folder).model(client=2)
