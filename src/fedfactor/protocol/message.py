"""Messages and their encoding in the safetensors format.

A message has a kind, a few JSON fields and named tensors. Its bytes are a safetensors file (eight bytes of header
length, a JSON header, the tensors one after another), so any safetensors reader opens them. The decoder does not trust
its input: it returns a message or raises `BadMessage`. The tensors of a decoded message are views of the given bytes.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfactor.profile import timed
from fedfactor.protocol.plan import Tensors
from fedfactor.protocol.wire import BadMessage as BadMessage
from fedfactor.protocol.wire import Bytes as Bytes

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FORMAT = "1"
LONGEST_HEADER = 1 << 20
"""Bytes; enough for about ten thousand tensors. Parsing JSON needs many times its length in memory."""
MOST_ELEMENTS = 1 << 48
MOST_AXES = 16


class NotFinite(BadMessage):
    """A message whose numbers are not finite."""


@dataclass(frozen=True)
class Message:
    """A kind, fields (any JSON values) and named tensors."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)


def encode(message: Message, **metadata: str) -> Bytes:
    """Return a message as bytes, which are writable so that decoding need not copy; equal messages give equal bytes.

    `metadata` is for other readers of safetensors files.
    """
    return Encoder(message.tensors).encode(message.kind, message.fields, **metadata)


class Encoder:
    """Encodes messages that have the same tensors, whose part of the header is written once."""

    @timed("encoding")
    def __init__(self, tensors: Tensors) -> None:
        places: dict[str, Any] = {}
        self._views, position = list[memoryview](), 0
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu().contiguous()
            size = tensor.numel() * tensor.element_size()
            places[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, position + size],
            }
            position += size
            self._views.append(_raw(tensor))
        self._places = f",{_WRITER.encode(places)[1:]}" if places else "}"

    def encode(self, kind: str, fields: dict[str, Any], **metadata: str) -> Bytes:
        """Return a message as bytes; see the function `encode`."""
        return joined(self.parts(kind, fields, **metadata))

    @timed("encoding")
    def parts(self, kind: str, fields: dict[str, Any], **metadata: str) -> list[Bytes]:
        """Return the bytes of a message in parts: its header, and views of the tensors, which are not copied."""
        about = {**metadata, "fedfactor": FORMAT, "kind": kind, "fields": _SORTED.encode(fields)}
        text = f'{{"__metadata__":{_WRITER.encode(about)}{self._places}'.encode()
        if len(text) > LONGEST_HEADER:
            raise ValueError(f"a message of {len(self._views)} tensors has a header of {len(text)} bytes: too long")
        text += b" " * (-len(text) % 8)  # tensors start on a multiple of eight, as the format asks
        return [len(text).to_bytes(8, "little") + text, *self._views]


def joined(parts: Iterable[Bytes]) -> bytearray:
    """Return the parts of a message as one, which is writable so that decoding need not copy."""
    return bytearray().join(parts)


def _raw(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


@timed("encoding")
def decode(data: Bytes) -> Message:
    """Return the message in `data`, or raise `BadMessage`. Never allocates more memory than `data` has."""
    metadata, tensors = _open(data)
    if not isinstance(metadata, dict) or metadata.get("fedfactor") != FORMAT:
        raise BadMessage("not a message of fedfactor, or one of another version of its format")
    kind, text = metadata.get("kind"), metadata.get("fields")
    if not isinstance(kind, str) or not isinstance(text, str):
        raise BadMessage("the header has no kind or no fields")
    return Message(kind, _parse(text), tensors)


def read_weights(path: Path, *, mapped: bool = False) -> Tensors:
    """Return the tensors of a safetensors file, such as a state dict. Raise ValueError if it is not a valid one.

    With `mapped`, the tensors are views of the file, whose memory all processes share until they write to them.
    """
    try:
        if not mapped or path.stat().st_size == 0:
            return _open(path.read_bytes())[1]
        with path.open("rb") as file:
            return _open(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))[1]
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except BadMessage as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def _open(data: bytes | bytearray | memoryview | mmap.mmap) -> tuple[object, Tensors]:
    """Split the bytes of a safetensors file into its metadata and its tensors."""
    # Torch has no read-only tensors, so a read-only buffer is copied.
    buffer = memoryview(bytearray(data) if memoryview(data).readonly else data).cast("B")
    if len(buffer) < 8:
        raise BadMessage(f"{len(buffer)} bytes are too few for a message")
    length = int.from_bytes(buffer[:8], "little")
    if length > min(LONGEST_HEADER, len(buffer) - 8):
        raise BadMessage(f"a header of {length} bytes does not fit in a message of {len(buffer)} bytes")
    header = _parse(bytes(buffer[8 : 8 + length]))
    metadata = header.pop("__metadata__", None)
    return metadata, _tensors(header, buffer[8 + length :])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise BadMessage("the header has the same name twice")
    return found


# Created once: json.loads and json.dumps would create them for each message.
_READER = json.JSONDecoder(object_pairs_hook=_unique)
_WRITER = json.JSONEncoder(separators=(",", ":"))
_SORTED = json.JSONEncoder(separators=(",", ":"), sort_keys=True)


def _parse(text: bytes | str) -> dict[str, Any]:
    try:
        parsed = _READER.decode(text if isinstance(text, str) else text.decode())
    except BadMessage:
        raise
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"header is not JSON: {type(error).__name__}") from error
    if not isinstance(parsed, dict):
        raise BadMessage("header is not a JSON object")
    return parsed


def _tensors(header: dict[str, Any], body: memoryview) -> Tensors:
    """Return the tensors, which must fill the body without gaps or overlaps."""
    entries = [(*_entry(name, entry), name) for name, entry in header.items()]
    entries.sort(key=lambda entry: entry[0])
    tensors, position = {}, 0
    for begin, end, dtype, shape, name in entries:
        if begin != position or end > len(body):
            raise BadMessage(f"tensor {name!r} lies at bytes {begin} to {end}, expected to start at {position}")
        tensors[name] = _view(body[begin:end], dtype, shape)
        position = end
    if position != len(body):
        raise BadMessage(f"the last {len(body) - position} bytes belong to no tensor")
    return tensors


def _entry(name: str, entry: object) -> tuple[int, int, torch.dtype, list[int]]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise BadMessage(f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise BadMessage(f"tensor {name!r} has an unknown dtype")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _whole(shape) or len(shape) > MOST_AXES or not _whole(offsets) or len(offsets) != 2:
        raise BadMessage(f"tensor {name!r} has an invalid shape or invalid offsets")
    begin, end = offsets
    if math.prod(n or 1 for n in shape) >= MOST_ELEMENTS:  # also where another axis is 0
        raise BadMessage(f"tensor {name!r} has an invalid shape or invalid offsets")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise BadMessage(f"tensor {name!r} of shape {shape} does not fit bytes {begin} to {end}")
    return begin, end, dtype, shape


def _whole(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in numbers)


def _view(data: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if dtype is torch.bool and int(raw.max()) > 1:
        raise BadMessage("a boolean tensor holds values other than 0 and 1")
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(shape)


@timed("encoding")
def expect(tensors: Tensors, like: Tensors, what: str) -> dict[str, float]:
    """Check that `tensors` has exactly the names, shapes and dtypes of `like`, and only finite numbers.

    Return the 2-norm of each.
    """
    if tensors.keys() != like.keys():
        missing, foreign = sorted(like.keys() - tensors.keys()), sorted(tensors.keys() - like.keys())
        raise BadMessage(f"{what}: missing {_some(missing)}, unexpected {_some(foreign)}")
    norms = {}
    for name, tensor in tensors.items():
        wanted = like[name]
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            raise BadMessage(
                f"{what}: {name!r} is {tensor.dtype} {list(tensor.shape)}, expected {wanted.dtype} {list(wanted.shape)}"
            )
        norms[name] = _norm(tensor)
        if not math.isfinite(norms[name]):
            raise NotFinite(f"{what}: {name!r} holds NaN, infinity or numbers too large to square")
    return norms


def finite(tensor: Tensor) -> bool:
    """Return whether all entries and their squares are finite: an optimizer may square the mean."""
    return math.isfinite(_norm(tensor))


def _norm(tensor: Tensor) -> float:
    """Return the 2-norm of a floating-point tensor; 0 for others."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0.0
    return float(torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)))


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return "nothing" if not names else ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
