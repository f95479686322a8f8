"""Bytes a second of a 60 MB model through encode, decode and validation, and what its message adds to its size."""

from __future__ import annotations

import torch

from benchmarks.harness import emit, medians, note
from fedfactor.protocol.message import Message, decode, encode, expect

TENSORS, ELEMENTS = 60, 250_000


def run() -> None:
    rng = torch.Generator().manual_seed(0)
    tensors = {f"layer{i}.weight": torch.randn(500, ELEMENTS // 500, generator=rng) for i in range(TENSORS)}
    size = TENSORS * ELEMENTS * 4

    def there_and_back() -> None:
        message = decode(encode(Message("train", {"client": 1, "round": 2}, tensors)))
        expect(message.tensors, tensors, "upload")

    seconds = medians({"all": there_and_back}, repeats=21, warmup=3)["all"]
    note(f"60 MB encoded, decoded and validated in {1e3 * seconds:.1f} ms")
    emit("wire_60_mb", size / seconds / 1e9, "GB/s", ">= 1")
    emit("wire_size", len(encode(Message("train", {}, tensors))) / size, "x tensors", "<= 1.01")
