"""Messages: what goes in comes out, and no bytes whatever get more than a typed error out of the decoder."""

from __future__ import annotations

import json
import tracemalloc

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors

from fedfactor.protocol.message import DTYPES, BadMessage, Message, decode, encode, expect, finite


def a_message() -> Message:
    tensors = {f"t/{name}": torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    return Message(
        "train",
        {"client": 3, "lr": 0.1},
        {**tensors, "empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)},
    )


def test_what_goes_in_comes_out() -> None:
    message = a_message()
    back = decode(encode(message))
    assert (back.kind, back.fields) == (message.kind, message.fields)
    assert back.tensors.keys() == message.tensors.keys()
    for name, tensor in message.tensors.items():
        assert back.tensors[name].dtype == tensor.dtype
        assert torch.equal(back.tensors[name], tensor)


def test_any_safetensors_reader_opens_the_bytes() -> None:
    message = a_message()
    found = load_safetensors(bytes(encode(message)))
    assert all(torch.equal(found[name], tensor) for name, tensor in message.tensors.items())


def test_the_order_of_names_does_not_matter() -> None:
    tensors = {"b": torch.ones(2), "a": torch.zeros(3)}
    assert encode(Message("x", {}, tensors)) == encode(Message("x", {}, dict(sorted(tensors.items()))))


def test_overhead_is_below_one_per_cent_of_a_real_model() -> None:
    tensors = {f"layer{i}.weight": torch.zeros(512, 512) for i in range(8)}
    size = sum(t.numel() * 4 for t in tensors.values())
    assert len(encode(Message("train", {}, tensors))) < 1.01 * size


def forged(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


META = {"fedfactor": "1", "kind": "k", "fields": "{}"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "too few"),
        (b"\xff" * 8, "does not fit"),
        (forged(b"[" * 100_000), "not JSON"),
        (forged(b"\xff\xfe"), "not JSON"),
        (forged([1]), "not a JSON object"),
        (forged({}), "not a message"),
        (forged({"__metadata__": {**META, "fedfactor": "2"}}), "another version"),
        (forged({"__metadata__": {**META, "fields": "[1]"}}), "not a JSON object"),
        (forged(b'{"__metadata__": {}, "__metadata__": {}}'), "twice"),
        (forged({"__metadata__": META, "t": 1}), "not described"),
        (
            forged({"__metadata__": META, "t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}),
            "does not fit bytes",
        ),
        (
            forged({"__metadata__": META, "t": {"dtype": "F9", "shape": [], "data_offsets": [0, 4]}}),
            "unknown dtype",
        ),
        (
            forged({"__metadata__": META, "t": {"dtype": [], "shape": [], "data_offsets": [0, 4]}}),
            "unknown dtype",
        ),
        (
            forged({"__metadata__": META, "t": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}),
            "invalid shape or invalid offsets",
        ),
        (
            forged({"__metadata__": META, "t": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}),
            "invalid shape or invalid offsets",
        ),
        (
            forged({"__metadata__": META, "t": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}),
            "lies at",
        ),
        (
            forged({"__metadata__": META, "t": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"ab"),
            "lies at",
        ),
        (forged({"__metadata__": META}, b"rest"), "belong to no tensor"),
        (forged({"__metadata__": {**META, "fields": "\ud800"}}), "not JSON"),
        (
            forged(
                {"__metadata__": META, "t": {"dtype": "U8", "shape": [0, 1 << 47, 1 << 47], "data_offsets": [0, 0]}}
            ),
            "invalid shape or invalid offsets",
        ),
        (
            forged({"__metadata__": META, "t": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]}}, b"\x07"),
            "boolean",
        ),
    ],
)
def test_forgeries_are_refused_with_their_reason(data: bytes, reason: str) -> None:
    with pytest.raises(BadMessage, match=reason):
        decode(data)


def decodes_or_refuses(data: bytes) -> None:
    tracemalloc.start()
    try:
        decode(data)
    except BadMessage:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 * len(data) + 200_000, "the decoder allocated more than the input could justify"


@settings(max_examples=300)
@given(st.binary(max_size=300))
@example(b"\x00" * 8)
def test_any_bytes_give_a_message_or_a_typed_error(data: bytes) -> None:
    decodes_or_refuses(data)


@settings(max_examples=500)
@given(st.data())
def test_any_damage_to_a_real_message_gives_a_message_or_a_typed_error(data: st.DataObject) -> None:
    message = bytearray(encode(a_message()))
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        where = data.draw(st.integers(0, len(message) - 1))
        if kind == "flip":
            message[where] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del message[where:]
        else:
            message[where:where] = data.draw(st.binary(max_size=9))
        if not message:
            break
    decodes_or_refuses(bytes(message))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


numbers = st.lists(st.sampled_from([0, 1, 2, 3, 8, 1 << 30, 1 << 47, -1]), max_size=4)
entry = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "X"]),
        "shape": numbers,
        "data_offsets": st.lists(st.integers(0, 40), max_size=2),
    }
)
metadata = st.fixed_dictionaries(
    {"fedfactor": st.just("1"), "kind": st.text(max_size=3), "fields": st.text() | st.just("{}")}
)


@settings(max_examples=300)
@given(st.dictionaries(st.text(max_size=3), entry, max_size=3), metadata, st.binary(max_size=40))
def test_any_described_tensors_give_a_message_or_a_typed_error(
    entries: dict[str, object], metadata: dict[str, str], body: bytes
) -> None:
    decodes_or_refuses(forged({**entries, "__metadata__": metadata}, body))


@given(st.dictionaries(st.text(max_size=4), json_like, max_size=3), st.binary(max_size=40))
def test_any_header_gives_a_message_or_a_typed_error(header: dict[str, object], body: bytes) -> None:
    decodes_or_refuses(forged({"__metadata__": META, **header}, body))


def test_expect_names_what_is_wrong() -> None:
    like = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    expect({"w": torch.ones(2, 3), "b": torch.ones(2)}, like, "upload")
    with pytest.raises(BadMessage, match="missing b, unexpected c"):
        expect({"w": torch.ones(2, 3), "c": torch.ones(2)}, like, "upload")
    with pytest.raises(BadMessage, match=r"'w' is torch.float32 \[3, 2\], expected torch.float32 \[2, 3\]"):
        expect({"w": torch.ones(3, 2), "b": torch.ones(2)}, like, "upload")


def test_finite_is_not_fooled_by_sums_that_overflow_or_cancel() -> None:
    assert finite(torch.full((4,), 1e18)) and finite(torch.full((4,), 6e4).half())
    assert not finite(torch.full((4,), 3e38)), "an optimizer would square this to infinity"
    assert not finite(torch.tensor([float("inf"), float("-inf")]))
    assert not finite(torch.tensor([1.0, float("nan")]))
    assert finite(torch.tensor([1, 2]))
