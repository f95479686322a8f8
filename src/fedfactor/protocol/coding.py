"""Coding of uploads and downloads: the codec codes the weights, all other tensors are sent as they are."""

from __future__ import annotations

from collections.abc import Collection

import torch

from fedfactor.profile import timed
from fedfactor.protocol.codecs import Codec
from fedfactor.protocol.plan import Tensors


def _split(tensors: Tensors, trained: Collection[str]) -> tuple[Tensors, Tensors]:
    """Split tensors into trained weights, which a codec may change, and the rest."""
    weights = {name: tensor for name, tensor in tensors.items() if name.partition(":")[0] in trained}
    return weights, {name: tensor for name, tensor in tensors.items() if name not in weights}


@timed("encoding")
def code_down(codec: Codec, trained: Collection[str], tensors: Tensors) -> Tensors:
    """Code a download."""
    weights, rest = _split(tensors, trained)
    return {**rest, **codec.down(weights)}


@timed("encoding")
def decode_down(codec: Codec, trained: Collection[str], coded: Tensors) -> Tensors:
    """Decode a download."""
    weights, rest = _split(coded, trained)
    return {**rest, **codec.from_down(weights)}


@timed("encoding")
def code_up(
    codec: Codec, trained: Collection[str], tensors: Tensors, reference: Tensors, state: Tensors, rng: torch.Generator
) -> tuple[Tensors, Tensors]:
    """Code an upload, with the download as `reference`; return it and the codec's new state."""
    weights, rest = _split(tensors, trained)
    coded, state = codec.up(weights, _split(reference, trained)[0], state, rng)
    return {**rest, **coded}, state


def expected_up(codec: Codec, trained: Collection[str], reference: Tensors) -> Tensors:
    """Return tensors with the names, shapes and dtypes that an upload must have."""
    weights, rest = _split(reference, trained)
    return {**rest, **codec.expected_up(weights)}


@timed("encoding")
def decode_up(codec: Codec, trained: Collection[str], coded: Tensors, reference: Tensors) -> Tensors:
    """Decode an upload."""
    weights, rest = _split(coded, trained)
    return {**rest, **codec.from_up(weights, _split(reference, trained)[0])}


def prefixed(section: str, tensors: Tensors) -> Tensors:
    """Prefix names with a section: `conv1.weight` becomes `model/conv1.weight`."""
    return {f"{section}/{name}": tensor for name, tensor in tensors.items()}


def sections(tensors: Tensors) -> dict[str, Tensors]:
    """Group tensors by section: `model/conv1.weight` is `conv1.weight` of the section `model`."""
    found: dict[str, Tensors] = {}
    for full, tensor in tensors.items():
        section, _, name = full.partition("/")
        found.setdefault(section, {})[name] = tensor
    return found
