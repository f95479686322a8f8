"""On the path of a process, this makes its clients slow, and damages some of their replies, always the same ones."""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import os
import sys
import time
from typing import Any

KINDS = ("cut", "length", "nan", "longer", "larger", "round")
"""What may be wrong with a reply."""
ONE_IN = 16
"""One in so many replies is damaged."""
OVERSIZE = 16 << 20
"""Bytes that are too many in a reply of kind `longer` or `larger`."""


def damage_of(round: int, client: int) -> str:
    """Return what is wrong with the reply of a client in a round, counted from 0; empty for most of them."""
    drawn = int.from_bytes(hashlib.sha256(f"{round} {client}".encode()).digest()[:8])
    return KINDS[drawn // ONE_IN % len(KINDS)] if drawn % ONE_IN == 0 else ""


def damaged(reply: bytearray, kind: str) -> bytes:
    """Return a reply that no honest client sends."""
    import torch

    from fedfactor.protocol.message import Message, decode, encode

    if kind == "cut":
        return bytes(reply[: len(reply) // 2])
    if kind == "length":
        return b"\xff" * 8 + reply[8:]
    if kind == "longer":
        return bytes(reply) + bytes(OVERSIZE)
    message = decode(reply)
    fields, tensors = dict(message.fields), dict(message.tensors)
    first = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    if kind == "nan":
        tensors[first] = torch.full_like(tensors[first], float("nan"))
    elif kind == "larger":
        tensors[first] = torch.zeros(OVERSIZE // tensors[first].element_size(), dtype=tensors[first].dtype)
    elif kind == "round":
        fields["round"] += 1
    else:
        raise ValueError(f"there is no damage of kind {kind!r}")
    return bytes(encode(Message(message.kind, fields, tensors)))


def slow_and_damaged(real: Any) -> Any:
    """Return `work` of a client that takes its time, and whose replies are damaged now and then."""

    def work(setup: Any, job: Any, *rest: Any) -> Any:
        from fedfactor.protocol.message import decode

        time.sleep(float(os.environ["SOAK_SLEEP"]))
        reply, new = real(setup, job, *rest)
        message = decode(bytearray(reply))
        kind = damage_of(message.fields["round"], message.fields["client"]) if message.kind == "trained" else ""
        return (damaged(bytearray(reply), kind) if kind else reply), new

    return work


class Damages(importlib.abc.MetaPathFinder):
    """Changes `work` when its module is imported, and not before."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "fedfactor.client.work":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.work = slow_and_damaged(module.work)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "SOAK_SLEEP" in os.environ:
    sys.meta_path.insert(0, Damages())
