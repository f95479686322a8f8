"""`fedfactor export RUN -o FOLDER`: the adapter of a fine-tuned run, of the server or of a client, or the merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedfactor
from fedfactor import Tune
from fedfactor.export import ExportError, export
from fedfactor.nn import compose
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.message import Message, encode, read_weights
from fedfactor.registry import create
from fedfactor.runs.execute import run
from fedfactor.runs.peft import with_adapter
from fedfactor.runs.recipe import override, resolve
from tests.helpers.command import fedfactor as command
from tests.helpers.tiny import Tiny, data

TABLES: dict[str, Any] = {
    "name": "tuned",
    "data": {"name": "digits", "test_share": 0.8},
    "partition": {"kind": "iid", "clients": 3},
    "model": {"name": "tests.helpers.tiny:Tiny"},
    "tune": {"targets": ["conv2", "hidden"], "train": ["fc"], "alpha": 4.0},
    "method": {"name": "lora", "rank": 2},
    "train": {"rounds": 2, "cohort": 3, "epochs": 1, "batch_size": 20, "lr": 0.05},
}
PERSONAL = ("fedsa_lora", "pfedpara", "feddecomp")
"""Methods whose adapter is complete only with a client's private part."""


def trained(folder: Path, *assignments: str) -> Path:
    """Run a recipe on the weights of a file, which the exported adapters are for."""
    base = folder.with_name("base.safetensors")
    if not base.exists():
        base.write_bytes(encode(Message("base", {}, Tiny().state_dict())))
    run(resolve(override(TABLES, [f"model.pretrained={base}", *assignments]), "tuned.toml"), folder)
    return folder


def answers(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0)))


def on_the_base(folder: Path, adapter: Path) -> nn.Module:
    """Return the base with an adapter."""
    model = Tiny()
    model.load_state_dict(read_weights(folder.with_name("base.safetensors")))
    return compose(with_adapter(model, Tune(adapter=str(adapter))))


@pytest.mark.parametrize(
    "method",
    ["lora", "low_rank", "ffa_lora", "rolora", "fedsa_lora", "hetlora", "raflora", "flexlora", "fedsvd", "fed_sb", "fedpara", "pfedpara", "feddecomp"],
)  # fmt: skip
def test_every_low_rank_change_is_an_adapter(method: str, tmp_path: Path) -> None:
    only = ["tune.targets=['hidden']", "train.epochs=2"] if method == "feddecomp" else []
    folder, out = trained(tmp_path / "run", f"method.name={method}", *only), tmp_path / "adapter"
    if method in PERSONAL:
        with pytest.raises(ExportError, match="has no server's model: a part of every model is private"):
            export(folder, out)
    client = 1 if method in PERSONAL else None
    found = export(folder, out, client=client)
    wanted = fedfactor.load(folder).model(client=client)
    torch.testing.assert_close(answers(on_the_base(folder, out)), answers(wanted), rtol=1e-4, atol=1e-5)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["peft_type"] == ("LOHA" if method in ("fedpara", "pfedpara") else "LORA")
    assert config["modules_to_save"] == ["fc"] and config["base_model_name_or_path"].endswith("base.safetensors")
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert found.snippet in found.card.read_text() and 'PeftModel.from_pretrained(base, "adapter")' in found.snippet
    assert "frozen base | SHA-256" in found.card.read_text()


def test_clients_adapters_differ_and_capacities_have_their_ranks(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run", "method.name=fedsa_lora")
    for client in (0, 1):
        export(folder, tmp_path / f"client-{client}", client=client)
    first, second = (read_weights(tmp_path / f"client-{c}" / "adapter_model.safetensors") for c in (0, 1))
    name = "base_model.model.hidden.lora_{}.weight"
    assert torch.equal(first[name.format("A")], second[name.format("A")])
    assert not torch.equal(first[name.format("B")], second[name.format("B")])
    levels = ("method={name='flexlora', rank=4}", "capacities={levels=[1.0, 0.5], shares=[0.5, 0.5]}")
    mixed = trained(tmp_path / "mixed", *levels)
    export(mixed, tmp_path / "small", capacity=0.5)
    assert json.loads((tmp_path / "small" / "adapter_config.json").read_text())["r"] == 2


def test_an_exported_adapter_starts_the_next_run(tmp_path: Path) -> None:
    folder = trained(tmp_path / "run")
    export(folder, tmp_path / "adapter")
    more = ["train.rounds=1", f"tune.adapter={tmp_path / 'adapter'}", "tune.targets=[]", "train.lr=0.0"]
    again = run(
        resolve(override(TABLES, [f"model.pretrained={tmp_path / 'base.safetensors'}", *more]), "again"),
        tmp_path / "again",
    )
    before = fedfactor.load(folder).server()
    assert again.server.tensors.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.server.tensors.items())


def test_a_change_without_such_a_form_is_merged(tmp_path: Path) -> None:
    for assignments, words in (
        (["method={name='fedavg'}"], "the method trains dense changes"),
        (["method={name='fedpara', tanh=true, rank=2}"], "LoHa has no tanh"),
        (["method={name='feddecomp', rank=2, share='both', simultaneous=true}"], "additive is not the product"),
    ):
        folder = trained(tmp_path / words[:6], *assignments)
        with pytest.raises(ExportError, match=rf"{words}.*; --merge writes the merged model instead"):
            export(folder, tmp_path / "adapter")
        assert not (tmp_path / "adapter").exists()
    found = export(folder, tmp_path / "merged", merge=True)
    assert found.path == tmp_path / "merged" / "model.safetensors"
    tensors, wanted = read_weights(found.path), tensors_of(fedfactor.load(folder).model())
    assert tensors.keys() == wanted.keys() == Tiny().state_dict().keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors.items())


def test_mistakes_are_named(tmp_path: Path) -> None:
    plain = tmp_path / "run"
    run(resolve({key: table for key, table in TABLES.items() if key != "tune"}, "plain.toml"), plain)
    with pytest.raises(
        ExportError, match=r"has no \[tune\], so it has no adapter: give a file, such as .*out.safetensors"
    ):
        export(plain, tmp_path / "out")


class Entries(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Examples as a mapping."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        return {"pixels": data().train[0][item], "labels": data().train[1][item]}


class Named(nn.Module):
    """A model that is called with the entries of a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Tiny()

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(pixels)
        return found


def test_a_run_from_python_with_batches_of_several_tensors(tmp_path: Path) -> None:
    tune, method = Tune(targets=("hidden",)), create("methods", "lora", rank=2)
    fedfactor.simulate(Named, [Entries()], method=method, tune=tune, rounds=1, directory=tmp_path / "run", seed=1)
    out = command("export", tmp_path / "run", "-o", tmp_path / "adapter", "--model", f"{__name__}:Named")
    assert out.exit_code == 0 and "PeftModel" in out.output, out.output
    assert "pixels" in (tmp_path / "adapter" / "README.md").read_text()
