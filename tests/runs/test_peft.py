"""Adapters in PEFT's format: what is written is read back, starts a run, and what has no such form is refused.

That PEFT itself loads them with equal outputs is tested in tests/third_party/test_peft.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedfactor
from fedfactor import Tune
from fedfactor.factor import Additive, ChannelSplit, Core, Dense, Hadamard, Scheme, SpatialSplit
from fedfactor.nn import adapt, compose, factor_weights
from fedfactor.nn.state import tensors_of
from fedfactor.protocol.message import Message, encode
from fedfactor.registry import create
from fedfactor.runs.peft import NoAdapter, adapter_of, with_adapter, write_adapter
from tests.helpers.tiny import Tiny, data, run

X = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(3))
TARGETS = ("conv1", "conv2", "hidden")


def trained(model: nn.Module, scheme: Scheme, targets: tuple[str, ...] = TARGETS, **how: Any) -> nn.Module:
    """Return an adapted model as if it had been trained: all its trained parameters are random."""
    network = adapt(model, scheme, targets=targets, generator=torch.Generator().manual_seed(1), **how).eval()
    for number, parameter in enumerate(p for p in network.parameters() if p.requires_grad):
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    return network


def stored(folder: Path, network: nn.Module) -> dict[str, Any]:
    config, tensors = adapter_of(network)
    folder.mkdir(exist_ok=True)
    write_adapter(folder, config, encode(Message("adapter", {}, tensors)))
    return config


def answers(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(X)


@pytest.mark.parametrize(
    ("scheme", "targets"),
    [
        (ChannelSplit(rank=1), TARGETS), (ChannelSplit(ratio=0.3), TARGETS), (SpatialSplit(rank=4), ("hidden",)),
        (Core(1), TARGETS), (Additive(rank=4), ("hidden",)), (Additive(rank=4, scaled=True, plain_view=True), ("hidden",)),
        (Hadamard(rank=2), ("conv2", "hidden")), (Hadamard(rank=2, personal=True), ("conv2", "hidden")),
    ],
)  # fmt: skip
def test_an_adapter_is_read_back_as_it_was_written(scheme: Scheme, targets: tuple[str, ...], tmp_path: Path) -> None:
    model = Tiny()
    network = trained(model, scheme, targets, alpha=5.0, train=("fc", "bn2"))
    config = stored(tmp_path / "adapter", network)
    assert config["target_modules"] == list(targets) and config["modules_to_save"] == ["bn2", "fc"]
    other = Tiny()
    other.load_state_dict(
        {**model.state_dict(), **{f"fc.{key}": torch.zeros_like(t) for key, t in model.fc.state_dict().items()}}
    )
    again = with_adapter(other, Tune(train=("fc",), adapter=str(tmp_path / "adapter")))
    torch.testing.assert_close(answers(again), answers(network), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(answers(compose(again)), answers(network), rtol=1e-4, atol=1e-5)


def test_ranks_that_differ_are_patterns_of_whole_names(tmp_path: Path) -> None:
    network = trained(Tiny(), ChannelSplit(ratio=0.3), alpha=3.0)
    config = stored(tmp_path / "adapter", network)
    ranks = {name: layer.factors["v"].shape[0] for name, layer in factor_weights(network).items()}
    assert len(set(ranks.values())) > 1
    for name, rank in ranks.items():
        fits = [own for pattern, own in config["rank_pattern"].items() if re.match(rf"(.*\.)?({pattern})$", name)]
        assert (fits or [config["r"]]) == [rank]
    assert config["lora_alpha"] == 3 and not config["alpha_pattern"]


class Repeated(nn.Module):
    """Names of which one is the end of another."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.my_head, self.q = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"q": nn.Linear(4, 4), "pair": nn.LSTM(4, 4)})


def test_names_that_peft_would_mix_up() -> None:
    config, _ = adapter_of(trained(Repeated(), ChannelSplit(rank=2), ("q",)))
    assert config["target_modules"] == ["inner.q", "q"] or config["target_modules"] == ["q", "inner.q"]
    config, _ = adapter_of(adapt(Repeated(), ChannelSplit(rank=2), targets=["head"]))
    assert config["target_modules"] == ["head"] and config["exclude_modules"] is None
    with pytest.raises(
        NoAdapter, match=r"PEFT finds modules by the end of their names, and would take my_head for head"
    ):
        adapter_of(adapt(Repeated(), ChannelSplit(rank=2), targets=["my_head"], train=["head"]))


def test_changes_without_such_a_form_are_named() -> None:
    for words, scheme, targets, how in (
        ("the method trains dense changes", Dense(), TARGETS, {}),
        ("hidden: PEFT's LoHa has no tanh", Hadamard(rank=2, tanh=True), ("hidden",), {}),
        ("conv1: a weight of the scheme spatial_split is not the product", SpatialSplit(rank=1), TARGETS, {}),
        ("conv1: a weight of the scheme additive is not the product", Additive(rank=1), TARGETS, {}),
        ("hidden.bias is trained whole, and belongs to a layer with a change", ChannelSplit(rank=2), ("hidden",), {"train": ("hidden.bias",)}),
    ):  # fmt: skip
        with pytest.raises(NoAdapter, match=words):
            adapter_of(trained(Tiny(), scheme, targets, **how))
    with pytest.raises(NoAdapter, match=r"inner.pair.weight_ih_l0 is a part of another layer"):
        adapter_of(adapt(Repeated(), ChannelSplit(rank=2), targets=["inner.pair.weight_ih_l0"]))
    dilated = nn.Sequential(nn.Conv2d(1, 4, 3, dilation=2), nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(NoAdapter, match=r"PEFT's adapters ignore dilation = \(2, 2\) of the convolution 0"):
        adapter_of(adapt(dilated, ChannelSplit(rank=2), targets=["0"]))


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    config = stored(folder, trained(Tiny(), ChannelSplit(rank=1), train=("fc",)))

    def refused(words: str, model: nn.Module | None = None, **changed: Any) -> None:
        (folder / "adapter_config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(ValueError, match=words):
            with_adapter(model or Tiny(), Tune(adapter=str(folder)))

    refused("only adapters of the types LORA and LOHA can be read, got IA3", peft_type="IA3")
    refused("an adapter with use_dora = True cannot be read", use_dora=True)
    refused("with init_lora_weights = 'pissa_niter_4', the adapter belongs to", init_lora_weights="pissa_niter_4")
    with_fc = nn.ModuleDict({"fc": nn.Linear(32, 10), "conv2": nn.Linear(2, 2)})
    refused(r"layer 'conv1' does not exist in the model; did you mean 'conv2'\? layers are fc, conv2", with_fc)
    wide = Tiny()
    wide.hidden = nn.Linear(200, 32)
    refused(r"layer 'hidden' \(32 x 200\): the factors have the sizes", wide)
    other = Tiny()
    other.fc = nn.Linear(32, 3)
    refused(r"which has no fc\.(weight|bias) of its shape", other)
    with_adapter(other, Tune(train=("fc",), adapter=str(folder)))  # a new classifier
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config.json is not JSON"):
        with_adapter(Tiny(), Tune(adapter=str(folder)))
    with pytest.raises(ValueError, match=r"has no adapter_config.json: tune.adapter is a folder"):
        with_adapter(Tiny(), Tune(adapter=str(tmp_path)))
    with pytest.raises(ValueError, match=r"tune.adapter changes the layer 'conv1', which tune.targets does not match"):
        (folder / "adapter_config.json").write_text(json.dumps(config))
        run("lora", model=Tiny(), tune=Tune(targets=("hidden",), adapter=str(folder)), capacities=None)


STARTS = {
    "lora": {"rank": 1}, "ffa_lora": {"rank": 1}, "fedsa_lora": {"rank": 1}, "rolora": {"rank": 1}, "fedsvd": {"rank": 1},
    "flexlora": {"rank": 1}, "hetlora": {"rank": 1}, "raflora": {"rank": 1}, "fedavg": {}, "fed_sb": {"rank": 1},
    "feddecomp": {"rank": 1}, "low_rank": {"rank": 1},
}  # fmt: skip


@pytest.mark.parametrize("method", STARTS)
def test_a_run_starts_from_an_adapter(method: str, tmp_path: Path) -> None:
    model = Tiny()
    network = trained(model, ChannelSplit(rank=1), train=("fc",), alpha=2.0)
    stored(tmp_path / "adapter", network)
    tune = Tune(train=("fc",), adapter=str(tmp_path / "adapter"))
    chosen = create("methods", method, **STARTS[method])
    result = run(chosen, model=model, tune=tune, capacities=None, rounds=0, evaluate_clients="none")
    start = result.model if result.federation.setup.has_global_model else result.client_model(0)
    torch.testing.assert_close(answers(start), answers(network), rtol=1e-3, atol=1e-4)
    if method == "lora":  # not only the product
        assert torch.equal(result.server.tensors["hidden.v"], factor_weights(network)["hidden"].factors["v"])
    moved = run(chosen, model=model, tune=tune, capacities=None, rounds=1, evaluate_clients="none")
    assert lasting_change(result, moved)
    assert {type(module) for module in model.children()} == {type(module) for module in Tiny().children()}


def lasting_change(before: Any, after: Any) -> bool:
    return any(not torch.equal(t, after.server.tensors[name]) for name, t in before.server.tensors.items())


def test_loha_starts_from_its_own_factors(tmp_path: Path) -> None:
    model = Tiny()
    network = trained(model, Hadamard(rank=2), ("hidden", "conv2"))
    stored(tmp_path / "adapter", network)
    tune = Tune(adapter=str(tmp_path / "adapter"))
    result = run(create("methods", "fedpara", rank=2), model=model, tune=tune, capacities=None, rounds=0)
    wanted = tensors_of(network)
    assert result.server.tensors.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in result.server.tensors.items())


def test_an_adapter_is_part_of_the_base_that_parties_compare(tmp_path: Path) -> None:
    model, bases = Tiny(), []
    for seed in (0, 1):
        network = trained(model, ChannelSplit(rank=1))
        network.hidden.u.data += seed
        stored(tmp_path / "adapter", network)
        tune = Tune(adapter=str(tmp_path / "adapter"))
        found = fedfactor.simulate(model, data(), method="lora", tune=tune, rounds=0, directory=tmp_path / str(seed))
        bases.append(found.federation.setup.base_sha256)
    assert bases[0] != bases[1]
    opened = fedfactor.load(tmp_path / "1", model=model).model()
    torch.testing.assert_close(answers(opened), answers(found.model))
