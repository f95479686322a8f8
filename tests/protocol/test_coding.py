"""Coding of uploads and downloads: weights come back within what the codec loses, all other tensors unchanged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.coding import code_down, code_up, decode_down, decode_up, expected_up, prefixed, sections
from fedfactor.registry import create
from tests.helpers.tiny import CODECS

TRAINED = {"layer.weight", "bias"}


def model(rng: torch.Generator, rows: int) -> dict[str, Tensor]:
    return {
        "layer.weight": torch.randn(rows, 3, generator=rng),
        "bias": torch.randn((), generator=rng),
        "norm.running_mean": torch.randn(rows, generator=rng),
        "norm.num_batches_tracked": torch.tensor(2**40 + 1),
    }


def largest_loss(codec: Codec, weight: Tensor, change: Tensor) -> Tensor:
    """Return by how much an entry may differ after an upload, rounding of float32 included."""
    if codec.name == "int8":
        return change.abs().max() / 127 + 1e-6
    if codec.name in ("fedpaq", "float16"):
        return weight.abs() / 2**11 + 2**-25  # 11 significant bits, and half of the smallest number
    return weight.abs() * (0 if codec.name == "float32" else 2**-22)


@pytest.mark.parametrize("name", CODECS)
@given(seed=st.integers(0, 2**20), rows=st.integers(0, 40))
def test_what_goes_up_comes_back(name: str, seed: int, rows: int) -> None:
    codec, rng = create("codecs", name), torch.Generator().manual_seed(seed)
    server, trained = model(rng, rows), model(rng, rows)
    down = code_down(codec, TRAINED, server)
    reference = decode_down(codec, TRAINED, down)
    coded, state = code_up(codec, TRAINED, trained, reference, {}, rng)
    wanted = expected_up(codec, TRAINED, reference)
    assert {n: (t.shape, t.dtype) for n, t in coded.items()} == {n: (t.shape, t.dtype) for n, t in wanted.items()}
    found = decode_up(codec, TRAINED, coded, reference)
    assert found.keys() == reference.keys() == server.keys()
    for key in server.keys() - TRAINED:
        assert torch.equal(reference[key], server[key]) and torch.equal(found[key], trained[key])
    for key in TRAINED:
        weight = trained[key] - state.get(key, torch.zeros(()))  # what top-k leaves out waits on the client
        assert found[key].dtype == trained[key].dtype
        if weight.numel():
            change = trained[key] - reference[key]
            assert ((found[key] - weight).abs() <= largest_loss(codec, weight.abs() + change.abs(), change)).all()
        assert (reference[key] - server[key]).abs().sum() == 0 or name == "float16"


NAMES = st.text("abc.:", min_size=1, max_size=6)


@given(st.dictionaries(st.sampled_from(["model", "extra", "kept"]), st.sets(NAMES, min_size=1), min_size=1))
def test_sections_are_taken_apart_as_they_were_put_together(names: dict[str, set[str]]) -> None:
    parts = {section: {name: torch.zeros(1) for name in own} for section, own in names.items()}
    joined = {name: tensor for section, own in parts.items() for name, tensor in prefixed(section, own).items()}
    assert sections(joined) == parts
