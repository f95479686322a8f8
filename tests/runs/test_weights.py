"""Pre-trained weights from a file: formats, prefixes, what may be missing, and what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedfactor.protocol.message import Message, encode
from fedfactor.runs.execute import run
from fedfactor.runs.recipe import RecipeError
from fedfactor.runs.weights import with_weights
from tests.helpers import grid
from tests.helpers.tiny import Tiny


def nothing(name: str) -> bool:
    return False


def head(name: str) -> bool:
    return name.startswith("fc.")


def stored(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    if path.suffix == ".safetensors":
        path.write_bytes(encode(Message("model", {}, tensors)))
    else:
        torch.save(tensors, path)
    return path


def test_all_formats_give_the_same_weights(tmp_path: Path) -> None:
    source = Tiny()
    source.bn1.running_mean.fill_(3)
    files = [stored(tmp_path / f"weights.{end}", source.state_dict()) for end in ("safetensors", "pth", "bin")]
    (tmp_path / "folder").mkdir()
    stored(tmp_path / "folder" / "model.safetensors", source.state_dict())
    nested = tmp_path / "nested.pt"
    torch.save({"state_dict": source.state_dict(), "epoch": 3}, nested)
    for path in [*files, tmp_path / "folder", nested]:
        found = with_weights(Tiny(), path, nothing).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in source.state_dict().items()), path


def test_a_file_of_an_old_torch_and_its_hash(tmp_path: Path) -> None:
    path, source = tmp_path / "old.pth", Tiny()
    torch.save(source.state_dict(), path, _use_new_zipfile_serialization=False)
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    assert torch.equal(with_weights(Tiny(), path, nothing, right).fc.weight, source.fc.weight)
    with pytest.raises(ValueError, match=rf"old.pth has the SHA-256 {right}, but model.pretrained_sha256 is 123"):
        with_weights(Tiny(), path, nothing, "123")
    with pytest.raises(ValueError, match="pretrained_sha256 is 123"):
        run(tuned(path, pretrained_sha256="123"), tmp_path / "run")


def test_prefixes_heads_and_types_may_differ(tmp_path: Path) -> None:
    source = {name: tensor.half() for name, tensor in Tiny().state_dict().items() if not name.startswith("fc")}
    wrapped = {f"net.body.{name}": tensor for name, tensor in source.items()}
    for given in (source, wrapped, {**source, "cls.weight": torch.ones(2)}):
        model, path = Tiny(), stored(tmp_path / "w.safetensors", given)
        before = model.fc.weight.clone()
        with_weights(model, path, head)
        assert torch.equal(model.conv1.weight, source["conv1.weight"].float()) and torch.equal(model.fc.weight, before)
    outer = nn.ModuleDict({"net": Tiny()})
    with_weights(outer, stored(tmp_path / "w.safetensors", source), lambda name: name.startswith("net.fc."))
    assert torch.equal(outer["net"].conv2.weight, source["conv2.weight"].float())


def test_a_file_is_mapped_and_never_written_to(tmp_path: Path) -> None:
    path = stored(tmp_path / "w.safetensors", Tiny().state_dict())
    before, model = path.read_bytes(), with_weights(Tiny(), path, nothing)
    with torch.no_grad():
        model.hidden.weight.zero_()
    assert path.read_bytes() == before and with_weights(Tiny(), path, nothing).hidden.weight.any()


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    whole = Tiny().state_dict()

    def refused(reason: str, tensors: dict[str, Any] | None = None, path: Path = tmp_path / "w.safetensors") -> None:
        if tensors is not None:
            stored(path, tensors)
        with pytest.raises(ValueError, match=reason):
            with_weights(Tiny(), path, nothing)

    refused(r"there is no file .*w.safetensors with weights: download it first")
    refused(r"has no fc.weight, fc.bias", {name: tensor for name, tensor in whole.items() if "fc" not in name})
    refused(r"hidden.weight is 2 x 2, the model has 32 x 256", {**whole, "hidden.weight": torch.ones(2, 2)})
    refused(r"fc.bias has NaN or infinite entries", {**whole, "fc.bias": torch.full((10,), torch.nan)})
    (tmp_path / "w.safetensors").write_bytes(b"")
    refused(r"is not a safetensors file")
    torch.save({"net": Tiny()}, tmp_path / "w.pth")
    refused(r"no file of weights that torch can read safely", path=tmp_path / "w.pth")
    torch.save([1], tmp_path / "w.pth")
    refused(r"does not hold a state dict", path=tmp_path / "w.pth")
    refused(r"there is no file .*model.safetensors", path=tmp_path)


def tuned(path: Path, method: str = "low_rank", pretrained_sha256: str = "", **tune: Any) -> Any:
    sha256 = {"pretrained_sha256": pretrained_sha256} if pretrained_sha256 else {}
    return grid.recipe(
        method,
        model={"name": "tests.helpers.tiny:Tiny", "pretrained": str(path), **sha256},
        capacities={"levels": [1.0], "shares": [1.0]},
        tune={"targets": ["hidden"], "train": ["fc"], **tune},
    )


def test_a_recipe_fine_tunes_pretrained_weights_on_every_engine(tmp_path: Path) -> None:
    body = {name: tensor for name, tensor in Tiny().state_dict().items() if not name.startswith("fc")}
    path = stored(tmp_path / "body.safetensors", body)
    chosen = tuned(path)
    result = run(chosen, tmp_path / "run")
    assert result.server.tensors.keys() == {"hidden.u", "hidden.v", "fc.weight", "fc.bias"}
    assert torch.equal(result.model.conv1.weight, body["conv1.weight"])
    assert not torch.equal(result.model.hidden.weight, body["hidden.weight"])
    assert grid.outcome(grid.Deployment(tmp_path / "flower", chosen).serve()) == grid.outcome(result)
    stored(path, {**body, "conv1.bias": body["conv1.bias"] + 1})
    with pytest.raises(ValueError, match="base was"):
        run(chosen, tmp_path / "run", resume=True)


def test_a_recipe_with_a_method_that_cannot_tune_is_refused(tmp_path: Path) -> None:
    for method in ("heterofl", "flanc", "prism"):
        with pytest.raises(RecipeError, match=f"{method} cannot fine-tune a frozen base"):
            tuned(tmp_path / "w.safetensors", method)
    with pytest.raises(RecipeError, match=r"tune.alpha should be greater than 0, got 0"):
        tuned(tmp_path / "w.safetensors", alpha=0.0)
    with pytest.raises(RecipeError, match=r"there is no key 'tune.target'; did you mean 'targets'"):
        tuned(tmp_path / "w.safetensors", target=["hidden"])
