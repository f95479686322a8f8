"""Pre-trained weights from a file, which is mapped: processes on one machine share its memory."""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fedfactor.protocol.message import finite, read_weights
from fedfactor.protocol.plan import Tensors

FILES = ("model.safetensors", "pytorch_model.bin")
"""Files with the weights in a folder of Hugging Face; the first that exists is used."""
NESTED = ("state_dict", "model")
"""Keys under which training scripts store the weights in a checkpoint."""


def with_weights(model: nn.Module, path: Path, fresh: Callable[[str], bool], sha256: str = "") -> nn.Module:
    """Give a model the weights of a file; change and return the model.

    The names may have another prefix in the file: the model of a wrapper, or a checkpoint of one. Tensors in the file
    that the model does not have, such as another head, are ignored.

    Args:
        model: The model.
        path: A safetensors file, a file of `torch.save` (.pth, .pt, .bin), or a folder of Hugging Face.
        fresh: Returns whether a tensor may be missing in the file, and then keeps its value.
        sha256: SHA-256 that the file must have; empty: any.

    Raises:
        ValueError: There is no such file, it is another one, or it does not fit the model.
    """
    own = model.state_dict(keep_vars=True)
    given = _renamed(read(path, sha256), own)
    there = {id(own[name]) for name in given if name in own}  # tied weights may be stored under one name
    counters = {name for name, tensor in own.items() if not tensor.is_floating_point()}
    missing = [n for n in own if n not in given and id(own[n]) not in there and n not in counters and not fresh(n)]
    if missing:
        raise ValueError(
            f"{path} does not fit the model: it has no {', '.join(missing[:3])}{' and others' * (len(missing) > 3)}. "
            "Tensors that are trained from scratch are listed in tune.train"
        )
    for name, tensor in own.items():
        if name not in given or (fresh(name) and given[name].shape != tensor.shape):  # a head for other classes
            continue
        if given[name].shape != tensor.shape:
            shapes = (" x ".join(map(str, one.shape)) for one in (given[name], tensor))
            wrong = "{} does not fit the model: {} is {}, the model has {}".format(path, name, *shapes)
            raise ValueError(f"{wrong}. Tensors that are trained from scratch are listed in tune.train")
        if not finite(given[name]):
            raise ValueError(f"{path}: {name} has NaN or infinite entries")
        tensor.data = given[name].to(tensor.dtype)
    return model


def read(path: Path, sha256: str = "") -> Tensors:
    """Return the tensors of a file of weights. Raise ValueError if there is none, or if it is not valid."""
    if path.is_dir():
        path = next((path / name for name in FILES if (path / name).exists()), path / FILES[0])
    if not path.exists():
        raise ValueError(f"there is no file {path} with weights: download it first, on each machine of the run")
    if sha256:
        with path.open("rb") as file:
            found_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if found_sha256 != sha256:
            raise ValueError(f"{path} has the SHA-256 {found_sha256}, but model.pretrained_sha256 is {sha256}")
    if path.suffix == ".safetensors":
        return read_weights(path, mapped=True)
    try:
        # Files of torch before 1.6 are no zip files, and cannot be mapped.
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(f"{path} is no file of weights that torch can read safely: {reason}") from None
    for key in NESTED:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ValueError(f"{path} does not hold a state dict: a table of tensors by name")
    return found


def _renamed(given: Tensors, own: Tensors) -> Tensors:
    """Return the given tensors with the prefix added or removed under which most of them are the model's."""
    added = {name.removesuffix(other) for name in own for other in given if name.endswith(f".{other}")}
    removed = {other.removesuffix(name) for name in own for other in given if other.endswith(f".{name}")}
    choices = [given]
    choices += [{prefix + name: tensor for name, tensor in given.items()} for prefix in sorted(added)]
    choices += [{name.removeprefix(prefix): tensor for name, tensor in given.items()} for prefix in sorted(removed)]
    return max(choices, key=lambda names: len(names.keys() & own.keys()))
